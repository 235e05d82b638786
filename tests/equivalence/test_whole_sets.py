"""Metrics of a whole validation set: wherever a trial trains as alone, and as by hand."""

from __future__ import annotations

import numpy as np
import pytest
import squads
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.errors import SpecError
from shoal.recipes.ownstep import summed_up
from shoal.testing import assert_same, plain_loop

EPOCHS = 3


def model(hp):
    layers = (nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(8, 2))


def rows(seed, count):
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=draws)
    return TensorDataset(x, (x[:, 0] + 0.5 * torch.randn(count, generator=draws) > 0).long())


def data(hp):
    return DataLoader(rows(0, 40), 8, shuffle=True), DataLoader(rows(1, 22), 8)  # 8, 8, 6


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def scores_and_labels(output, batch):
    return output[:, 1] - output[:, 0], batch[1]


def auc(scores, labels):
    """How often a positive example has the higher score."""
    higher = scores[labels == 1][:, None] - scores[labels == 0][None]
    return ((higher > 0).double() + 0.5 * (higher == 0)).mean()


def counts(output, batch, hp):
    return {"right": (output.argmax(1) == batch[1]).sum() * hp["unit"], "of": len(batch[1])}


def share(right, of, hp):
    assert right.shape == of.shape == (3,)
    return float(right.sum() / of.sum() / hp["unit"])


def bootstrapped(scores):
    return np.random.default_rng(np.random.randint(99)).choice(scores, 9).mean() + torch.rand(())


METRICS = {
    "auc": shoal.WholeSet(scores_and_labels, auc),
    "accuracy": shoal.WholeSet(counts, share),
    "mean": lambda output, batch: float(output.mean()),
    "drawn": shoal.WholeSet(lambda output, batch: output[:, 0].numpy(), bootstrapped),
}
RECIPE = shoal.Recipe(model=model, data=data, loss=loss, metrics=METRICS, splittable=True)
SPACE = {**shoal.grid(lr=[1e-3, 1e-2]), "unit": 2.0}


def by_hand(net):
    net.eval()
    with torch.no_grad():
        x, y = rows(1, 22).tensors
        output = net(x)
    scores = output[:, 1] - output[:, 0]
    return {
        "valid_auc": float(auc(scores, y)),
        "valid_accuracy": float((output.argmax(1) == y).double().mean()),
    }


def test_it_is_of_all_examples():
    found = plain_loop(RECIPE, {"lr": 0.01, "unit": 2.0}, 0, epochs=EPOCHS)
    expected = by_hand(found.model)
    for name, value in expected.items():
        assert found.metrics[name] == pytest.approx(value, abs=1e-6)
    again = plain_loop(RECIPE, {"lr": 0.01, "unit": 2.0}, 0, epochs=EPOCHS)
    assert again.metrics == found.metrics


@pytest.fixture
def run(tmp_path, warm_workers):
    def runs(devices=1, study=None, of=RECIPE, **options):
        asked = {"space": SPACE, "epochs": EPOCHS, "metric": "valid_auc", "mode": "max"}
        made = shoal.Study("it", of, directory=tmp_path, **{**asked, **(study or {})})
        hardware = shoal.Hardware.virtual(devices=devices, memory="64MiB")
        return made.run(hardware=hardware, workers=warm_workers, **options)

    return runs


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"technique": shoal.Spilled(shards=2)},
        {"technique": shoal.Pipelined(schedule="flush", stages=2), "devices": 2},
        {"technique": shoal.Pipelined(stages=2, shards=4), "devices": 2},
    ],
    ids=["resident", "spilled", "pipelined", "spilled stages"],
)
def test_wherever_it_trains(options, run):
    for trial in run(**options).trials:
        assert not trial.error
        alone = plain_loop(RECIPE, trial.hp, trial.seed, epochs=EPOCHS)
        assert_same(alone, trial)
        assert dict(trial.metrics) == dict(alone.metrics)
        assert trial.metrics["valid_auc"] > 0.5


@pytest.mark.parametrize("fuse", [2, "2-branches"])
def test_each_slot_of_an_array_has_its_own(fuse, run):
    report = run(fuse=fuse)
    assert set(squads.widths(report)) == {2}
    for trial in report.trials:
        expected = by_hand(trial.load())
        for name, value in expected.items():
            assert trial.metrics[name] == pytest.approx(value, abs=1e-6)
    squads.assert_verified(report, RECIPE)


def test_replicas_have_it_of_all_rows(run):
    report = run(devices=2, technique=shoal.DataParallel(width=2))
    squads.assert_verified(report, RECIPE)


def test_a_search_goes_by_it(run):
    report = run(study={"pruner": "median", "generation": 2, "trials": 2})
    assert all("valid_auc" in trial.metrics for trial in report.trials)
    squads.assert_verified(report, RECIPE)


def summed(metric, *batches):
    recipe = shoal.Recipe(model=model, data=data, loss=loss, metrics={"it": metric})
    return summed_up(recipe, [{"valid_it": metric(output, None)} for output in batches])


def test_what_is_collected_is_joined_in_its_first_dimension():
    is_same = shoal.WholeSet(lambda output, batch: output, lambda joined: float(joined.sum()))
    assert summed(is_same, torch.ones(2, 3), torch.ones(1, 3)) == {"valid_it": 9.0}
    assert summed(is_same, np.ones(2), np.ones(4)) == {"valid_it": 6.0}
    assert summed(is_same, 1.5, torch.tensor(2)) == {"valid_it": 3.5}
    assert summed(is_same, 100000003.0, 0.1) == {"valid_it": 100000003.1}


def test_what_cannot_be_joined_is_told_of_by_name():
    is_same = shoal.WholeSet(lambda output, batch: output, lambda joined: float(joined.sum()))
    with pytest.raises(SpecError, match=r"metrics\['it'\].*shape \(2, 3\).*cannot be joined"):
        summed(is_same, torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(SpecError, match="collected str from the validation batches"):
        summed(is_same, "a", "b")
    with pytest.raises(SpecError, match="collected 2 kinds of things"):
        summed(is_same, (1, 2), {"a": 1})
    with pytest.raises(SpecError, match=r"compute=\.\.\.\)\) returned a tensor of shape \(2,\)"):
        summed(shoal.WholeSet(lambda output, batch: output, lambda one: one), torch.ones(2))
    with pytest.raises(SpecError, match=r"WholeSet\(compute=...\) is a function, got int"):
        shoal.WholeSet(scores_and_labels, 3)


def test_a_study_is_not_gone_on_with_another_one(run):
    run(study={"epochs": 1})
    others = {**METRICS, "auc": shoal.WholeSet(scores_and_labels, lambda s, y: 1.0)}
    of = shoal.Recipe(model=model, data=data, loss=loss, metrics=others, splittable=True)
    with pytest.raises(SpecError, match="trained with another recipe"):
        run(of=of)


def test_a_report_finds_it_again_by_its_names(tmp_path, warm_workers):
    named = {"auc": shoal.WholeSet(scores_and_labels, auc)}
    of = shoal.Recipe(model=model, data=data, loss=loss, metrics=named)
    study = shoal.Study("it", of, space={"lr": 0.01}, epochs=1, directory=tmp_path)
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    study.run(hardware=hardware, workers=warm_workers)
    assert by_hand(shoal.open(tmp_path / "it").best.load())["valid_auc"] > 0


def test_means_are_of_sums_one_by_one_in_every_python():
    recipe = shoal.Recipe(model=model, data=data, loss=loss)
    found = [{"valid_loss": value} for value in (1e16, 1.0, 1.0, -1e16)]
    assert summed_up(recipe, found) == {"valid_loss": (((1e16 + 1.0) + 1.0) - 1e16) / 4}
