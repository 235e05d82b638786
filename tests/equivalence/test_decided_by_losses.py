"""Losses that decide by their data run slot by slot in an array, whose models run as one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import squads
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.arraykeys import LOOPED
from shoal.fusion.passes.template import LOSS
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot

QUERIES, CLASSES, WIDTH = 4, 3, 16
SPACE = shoal.grid(lr=[1e-2, 1e-3, 3e-3])


@dataclass
class Found:
    """What a detector returns, by fields of its own."""

    scores: Tensor
    places: Tensor


class Detector(nn.Module):
    """A few objects for each row: their classes, and where they are."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Dropout(0.1))
        self.scores = nn.Linear(WIDTH, QUERIES * CLASSES)
        self.places = nn.Linear(WIDTH, QUERIES)

    def forward(self, x):
        inside = self.body(x)
        return Found(self.scores(inside).unflatten(-1, (QUERIES, CLASSES)), self.places(inside))


def detector(hp):
    return Detector().double()


def embedding(hp):
    layers = [nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)]
    return nn.Sequential(*layers).double()


def data(hp):
    random = torch.Generator().manual_seed(1)
    x = torch.randn(40, 8, generator=random).double()
    label = torch.randint(2, (40, 2), generator=random)
    rows = TensorDataset(x, label, torch.rand(40, 2, generator=random).double())
    return DataLoader(rows, batch_size=8, shuffle=True), DataLoader(rows, 16)


def by_matching(found, batch, hp):
    """Each target goes to the nearest object that is free; the others are of no class."""
    _, label, place = batch
    target = torch.full(found.scores.shape[:2], CLASSES - 1)
    apart = 0.0
    for row in range(len(label)):
        free = list(range(QUERIES))
        for one in range(label.shape[1]):
            off = (found.places[row, free] - place[row, one]).abs()
            taken = free.pop(int(off.argmin()))
            target[row, taken] = label[row, one]
            apart = apart + (found.places[row, taken] - place[row, one]).abs()
    return F.cross_entropy(found.scores.flatten(0, 1), target.flatten()) + hp["lr"] * apart


def by_mining(output, batch):
    """Of the pairs only those that are hard: other numbers of them in each trial."""
    label = batch[1][:, 0]
    apart = torch.cdist(output, output)
    alike = label[:, None] == label[None]
    near, far = apart[~alike], apart[alike]
    hard = near[near < far.detach().mean()]
    return far.mean() + (1 - hard).relu().sum() / max(1, len(hard))


def by_lot(output, batch):
    """It draws which rows to look at, as many as their norms say."""
    least = output.detach().norm(dim=1).median().item()
    rows = torch.randperm(len(output))[: 2 + int(1000 * least) % 5]
    return (output[rows] - batch[0][rows, :4]).square().mean()


def by_rate(output, batch, hp):
    """A comparison that holds for some of the trials alone."""
    loss = output.square().mean() + F.cross_entropy(output, batch[1][:, 0])
    return loss if hp["lr"] < 2e-3 else loss.sqrt()


def keys(report):
    return [dict(row.numerics) for row in Snapshot.of(read_outline(report.directory)).trials]


RECIPES = {
    "matching": shoal.Recipe(model=detector, data=data, loss=by_matching),
    "mining": shoal.Recipe(model=embedding, data=data, loss=by_mining),
    "rate": shoal.Recipe(model=embedding, data=data, loss=by_rate),
    "lot": shoal.Recipe(model=embedding, data=data, loss=by_lot, accumulate=2),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("technique", [None, shoal.Spilled(shards=2)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_models_train_as_an_array_and_each_loss_as_alone(name, technique, run_study):
    """Three trials in two slots: the last one is alone in its array."""
    recipe = RECIPES[name]
    report = run_study(recipe, SPACE, epochs=2, fuse=2, technique=technique)
    assert [key[LOOPED] for key in keys(report)] == [LOSS] * 3
    squads.assert_near(report.trials, recipe, 1e-9, epochs=2)
    squads.assert_verified(report, recipe)


def test_a_loss_that_raises_fails_its_trial_alone(run_study):
    def picky(output, batch, hp):
        if hp["lr"] > 5e-3 and by_mining(output, batch).item() < 1e9:
            raise ValueError("no such rate")
        return by_mining(output, batch)

    recipe = dataclasses.replace(RECIPES["mining"], loss=picky)
    report = run_study(recipe, SPACE, epochs=1, fuse=3)
    states = {trial.hp["lr"]: trial.state for trial in report.trials}
    assert states == {1e-2: "FAILED", 1e-3: "FINISHED", 3e-3: "FINISHED"}
    squads.assert_verified(report, recipe, failed=(0,))
