"""Code that finds its trial's model in a global: an array would have one model there for all."""

from __future__ import annotations

import pytest
import squads
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import shoal

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
