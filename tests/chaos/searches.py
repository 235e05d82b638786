"""A study whose trials depend on each other's results: asked of a sampler, ended by a pruner.

Imported by tests and, by this name, by worker processes and by the files that ``Runner`` writes.
"""

from __future__ import annotations

from pathlib import Path

import studies
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.recipes.recipe import Recipe

EPOCHS, TRIALS, GENERATION = 4, 11, 3
SPACE = {
    "lr": shoal.log_uniform(1e-4, 1e-1),
    "norm": shoal.choice(False, True, when={False: {"dropout": shoal.uniform(0.0, 0.5)}}),
}


def build(hp):
    middle = nn.BatchNorm1d(12) if hp["norm"] else nn.Dropout(hp["dropout"])
    return nn.Sequential(nn.Linear(6, 12), middle, nn.ReLU(), nn.Linear(12, 3))


def data(hp):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(96, 6, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    train, valid = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    return DataLoader(train, 16, shuffle=True), DataLoader(valid, 16)


def loss(output, batch):
    if studies.is_worker():
        studies.lack_space()
        studies.wait()
    return F.cross_entropy(output, batch[1])


def recipe() -> Recipe:
    return Recipe(model=build, data=data, loss=loss)


def make(directory, *, name="k", **options) -> shoal.Study:
    """The study: 4 steps an epoch, evaluated after each."""
    usual = {"space": SPACE, "trials": TRIALS, "epochs": EPOCHS, "generation": GENERATION}
    usual |= {"sampler": "tpe", "pruner": "asha", "checkpoint_every": 0.1}
    return shoal.Study(name, recipe(), directory=directory, **(usual | options))


def outcome(place: Path) -> list[tuple]:
    """All that the results say of each trial, but what it took."""
    report = shoal.open(place, recipe())
    known = []
    for trial in report.trials:
        curve = [(row["step"], row["metrics"]) for row in trial.history]
        what = (trial.number, dict(trial.hp), trial.seed, str(trial.state))
        known.append((*what, dict(trial.metrics), curve))
    return known
