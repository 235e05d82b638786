"""Code that finds its trial's model in a global.

An array would have one model there for all; shards, stages and replicas by shards a part of one.
"""

from __future__ import annotations

import pytest
import squads
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal import DataParallel, Spilled
from shoal.core.errors import PlanError, TooLarge
from shoal.core.technique import Pipelined

NET = None
KEPT = {}
TEACHER = nn.Linear(6, 3, dtype=torch.float64)  # no trial's own, and the same in each process
TEACHER.load_state_dict({"weight": torch.eye(3, 6), "bias": torch.zeros(3)})


def model(hp):
    global NET
    NET = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    KEPT["start"] = [(p, p.detach().clone()) for p in NET.parameters()]
    return NET


def rows(hp):
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(16, 6, generator=draws, dtype=torch.float64)
    return TensorDataset(x, torch.arange(16) % 3)


def data(hp):
    return DataLoader(rows(hp), 4, shuffle=True), DataLoader(rows(hp), 8)


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sparse(output, batch):
    return loss(output, batch) + 0.1 * sum(p.abs().sum() for p in NET.parameters())


def near_its_start(output, batch):
    """Nothing at the first step, in which an array is held against its trials alone."""
    return loss(output, batch) + sum((p - at).square().sum() for p, at in KEPT["start"])


def size(output, batch):
    return sum(p.detach().abs().sum().item() for p in NET.parameters())


class Slower(LambdaLR):
    """Steps are smaller the larger the weights are."""

    def step(self):
        super().step()
        for group in self.optimizer.param_groups:
            group["lr"] /= 1 + 0.01 * size(None, None)


def slower(optimizer, hp):
    return Slower(optimizer, lambda step: 1.0)


def by_first_weights(optimizer, hp):
    return LambdaLR(optimizer, lambda step: 1 / (1 + NET[0].weight.detach().abs().sum().item()))


def unfreezing(output, batch):
    NET[0].weight.requires_grad_(True)
    return loss(output, batch)


def frozen(hp):
    net = model(hp)
    net[0].weight.requires_grad_(False)
    return net


def larger_when_evaluated(output, batch):
    return loss(output, batch) + (0.0 if NET.training else 0.01 * size(output, batch))


def sparse_in_second_batches(output, batch):
    value = loss(output, batch)
    return value + 0.1 * NET[0].weight.abs().sum() if batch[1].sum() > 3 else value


def scaled_when_evaluated(batch):
    return (batch[0] if NET.training else batch[0] * NET[2].weight.detach().abs().sum(),)


def in_order(hp):
    """Of batches whose labels add up to 3, 4, 5 and 3."""
    return DataLoader(rows(hp), 4), None


def distilled(output, batch):
    with torch.no_grad():
        wanted = TEACHER(batch[0]).softmax(1)
    return F.cross_entropy(output, wanted)


def recipe(**changes):
    settings = {"model": model, "data": data, "loss": loss, "optimizer": squads.sgd}
    return shoal.Recipe(**(settings | changes))


CASES = {
    "loss": {"loss": sparse},
    "containers": {"loss": near_its_start},
    "metrics": {"metrics": {"size": size}},
    "schedule": {"schedule": slower},
}


@pytest.mark.parametrize("fuse", ["3-eager", "3-branches"])
@pytest.mark.parametrize("case", CASES)
def test_such_trials_train_by_themselves_and_the_plan_says_why(
    case, fuse, run_study, assert_alone
):
    """They had the penalty, or the metric, of the model that was made last."""
    of = recipe(**CASES[case])
    report = run_study(of, shoal.grid(lr=[0.1, 0.03, 0.01]), epochs=2, fuse=fuse)
    assert squads.widths(report) == [1] * 3
    words = f"the code of Recipe({next(iter(CASES[case]))}=...) finds the model without being"
    if case == "containers":  # beside the weights there are copies, which are other ones each time
        words = f"making a trial sets '{__name__}.KEPT.start"
    assert words in (report.directory / "plan.json").read_text()
    assert_alone(report, report.trials, of, epochs=2)


def test_a_model_that_is_no_trials_own_keeps_nobody_apart(run_study):
    of = recipe(loss=distilled)
    report = run_study(of, shoal.grid(lr=[0.1, 0.03]), epochs=2, fuse=2)
    assert squads.widths(report) == [2] * 2
    squads.assert_verified(report, of)


def test_verifying_leaves_a_model_that_a_global_holds_as_it_was_trained(run_study):
    """What is put back between trials is globals, and not what is in the model."""
    of = recipe(loss=near_its_start)
    report = run_study(of, shoal.grid(lr=[0.1, 0.03]), epochs=2)
    squads.assert_verified(report, of)


# -- shards and stages --------------------------------------------------------------------

FINDING = {"metrics": {"metrics": {"size": size}}, "schedule": {"schedule": by_first_weights}}


def finds(field):
    return rf"the code of Recipe\({field}=...\) finds the model without being given it"


@pytest.mark.parametrize("field", FINDING)
def test_code_that_would_find_weights_away_keeps_a_model_whole(field, run_study, assert_alone):
    """A metric was NaN in shards, and a schedule failed or was another one."""
    of = recipe(**FINDING[field])
    report = run_study(of, shoal.grid(lr=[0.1, 0.03]), epochs=2, technique="spilled")
    assert "finds the model without being given" in (report.directory / "plan.json").read_text()
    assert_alone(report, report.trials, of, epochs=2)


@pytest.mark.parametrize("field", FINDING)
@pytest.mark.parametrize("technique", [Spilled(shards=2), Pipelined(stages=2)])
def test_shards_and_stages_of_it_are_refused_in_words(technique, field, run_study):
    of, space = recipe(accumulate=2, **FINDING[field]), {"lr": 0.1}
    with pytest.raises(
        PlanError, match=rf"was asked .* cut: {finds(field)}.*technique='resident'"
    ):
        run_study(of, space, technique=technique, devices=2, steps=2)


def test_one_that_has_no_room_as_a_whole_is_told_why_it_is_not_cut(run_study):
    of = recipe(metrics={"size": size})
    with pytest.raises(TooLarge, match=rf"it cannot be cut: {finds('metrics')}"):
        run_study(of, {"lr": 0.1}, memory="4KiB", steps=2)


@pytest.mark.parametrize("technique", [Spilled(shards=2), Pipelined(stages=2)])
@pytest.mark.parametrize(
    ("field", "code", "name"),
    [
        ("loss", larger_when_evaluated, "0.weight"),
        ("inputs", scaled_when_evaluated, "2.weight"),
    ],
)
def test_what_reads_more_weights_in_evaluation_is_not_cut(field, code, name, technique, run_study):
    """Training was exact, and each validation loss NaN."""
    of = recipe(accumulate=2, **{field: code})
    with pytest.raises(PlanError, match=rf"cut: .*{finds(field)}, and reads '{name}'"):
        run_study(of, {"lr": 0.1}, technique=technique, devices=2, steps=2)


@pytest.mark.parametrize("penalty", [sparse, near_its_start])
def test_a_penalty_on_weights_is_exact_in_shards(penalty, run_study, assert_alone):
    """The shard with the loss has the weights that it reads."""
    of = recipe(loss=penalty)
    report = run_study(of, {"lr": 0.1}, technique=Spilled(shards=2), epochs=2)
    assert_alone(report, report.trials, of, epochs=2)


def test_a_loss_that_comes_to_read_other_weights_fails_its_trial(run_study):
    """It found NaN, or weights whose gradient went nowhere."""
    of = recipe(loss=sparse_in_second_batches, data=in_order)
    (trial,) = run_study(of, {"lr": 0.1}, technique=Spilled(shards=2), epochs=1).trials
    assert "and reads '0.weight', which it did not in the step by which" in trial.error


# -- replicas -----------------------------------------------------------------------------

SHARED = FINDING | {"loss": {"model": frozen, "loss": unfreezing}}


@pytest.mark.parametrize("field", SHARED)
def test_replicas_by_shards_of_it_are_refused_in_words(field, run_study):
    """They had a metric, a schedule, or a loss of a replica's rows of each weight."""
    of, technique = recipe(splittable=True, **SHARED[field]), DataParallel(width=2, shard=True)
    with pytest.raises(PlanError, match=rf"2 replicas, but {finds(field)}.*shard=False"):
        run_study(of, {"lr": 0.1}, technique=technique, devices=2, steps=2)


@pytest.mark.parametrize("field", FINDING)
def test_replicas_of_whole_weights_are_exact(field, run_study):
    of, technique = recipe(splittable=True, **FINDING[field]), DataParallel(width=2)
    report = run_study(of, {"lr": 0.1}, technique=technique, devices=2, epochs=2)
    squads.assert_verified(report, of)
