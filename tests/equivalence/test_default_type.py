"""``torch.set_default_dtype`` at the head of a file holds for its trials, which workers train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.recipes.recipe import Recipe


def build(hp):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def data(hp):
    draws = torch.Generator().manual_seed(1)
    return [(torch.rand(5, 4, generator=draws), torch.rand(5, 1, generator=draws))] * 3, None


def loss(output, batch):
    return (output - batch[1]).square().mean()


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("technique", ["resident", shoal.Spilled(shards=2)], ids=str)
def test_trials_have_the_default_type_of_who_asks_for_them(
    technique, double, run_study, assert_alone
):
    recipe = Recipe(model=build, data=data, loss=loss)
    report = run_study(recipe, shoal.grid(lr=[0.1, 0.01]), steps=4, technique=technique)
    assert next(report.trials[0].load().parameters()).dtype == torch.float64
    assert_alone(report, report.trials, recipe, steps=4)
    rows = Snapshot.of(read_outline(report.directory)).trials
    assert {row.numerics["default type"] for row in rows} == {"float64"}


class Asking(nn.Module):
    """Asks for the default type in its forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return (self.inner(x) + torch.linspace(0, 1, 4) / 3).tanh()


def build_of_type(hp):
    if hp["double"]:
        torch.set_default_dtype(torch.float64)
    return nn.Sequential(Asking(), Asking(), nn.Linear(4, 1))


def typed(batch):
    return (batch[0].to(torch.get_default_dtype()),)


@pytest.mark.parametrize("technique", ["resident", shoal.Spilled(shards=2)], ids=str)
def test_trials_that_alternate_have_each_the_type_that_its_making_set(technique, run_study):
    recipe = Recipe(model=build_of_type, data=data, loss=loss, inputs=typed)
    space = shoal.grid(lr=[0.1, 0.01], double=[True, False])
    report = run_study(recipe, space, steps=4, technique=technique)
    types = [trial.load_state()["model"]["2.bias"].dtype for trial in report.trials]
    assert types == [torch.float64, torch.float32] * 2
    words = Snapshot.of(read_outline(report.directory)).warnings
    assert not any("default_dtype" in one for one in words)
    assert report.verify([0, 1, 2, 3])
    assert torch.get_default_dtype() == torch.float32
