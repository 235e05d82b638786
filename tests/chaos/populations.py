"""A study whose trials go on from each other's states.

Imported by tests and, by this name, by worker processes and by the files that ``Runner`` writes.
"""

from __future__ import annotations

from pathlib import Path

import searches
import studies
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.recipes.recipe import Recipe
from shoal.testing import PlainTrial, assert_same, plain_population
from shoal.verify import read_losses

EPOCHS, TRIALS = 4, 5
SPACE = {
    "lr": shoal.log_uniform(1e-4, 1e-1),
    "weight_decay": shoal.uniform(0.0, 0.1),
    "dropout": shoal.choice(0.1, 0.2, 0.3),
}


def build(hp):
    return nn.Sequential(
        nn.Linear(6, 12),
        nn.BatchNorm1d(12),
        nn.Dropout(hp["dropout"]),
        nn.ReLU(),
        nn.Linear(12, 3),
    )


def loss(output, batch):
    if studies.is_worker():
        studies.lack_space()
        studies.wait()
    return F.cross_entropy(output, batch[1])


def schedule(optimizer, hp):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)


def recipe() -> Recipe:
    return Recipe(model=build, data=searches.data, loss=loss, schedule=schedule)


def make(directory, *, name="k", **options) -> shoal.Study:
    """The study: 4 steps an epoch, evaluated after each; two of five copy two others."""
    usual = {"space": SPACE, "trials": TRIALS, "pruner": shoal.PBT(quantile=0.4)}
    usual |= {"checkpoint_every": 0.1}
    usual |= {} if "steps" in options else {"epochs": EPOCHS}
    return shoal.Study(name, recipe(), directory=directory, **(usual | options))


def outcome(place: Path) -> list[tuple]:
    """All that the results say of each trial, but what it took."""
    known = searches.outcome(place)
    report = shoal.open(place, recipe())
    return [(*one, trial.inherited) for one, trial in zip(known, report.trials, strict=True)]


def lineages(place: Path) -> dict[int, PlainTrial]:
    """How each trial began, and from whom it went on."""
    return {
        row.number: PlainTrial(
            hp=row.inherited[0].before if row.inherited else row.hp,
            seed=row.seed,
            inherits={taken.step: (taken.source, taken.hp) for taken in row.inherited},
        )
        for row in Snapshot.of(read_outline(place)).trials
    }


def assert_lineage(report, using: Recipe | None = None, **loop) -> None:
    """Every finished trial ended on the bits of plain loops that do what is on record."""
    trials, losses = lineages(report.directory), read_losses(report.directory)
    for trial in report.trials:
        if str(trial.state) == "FINISHED":
            plain = plain_population(using or recipe(), trials, trial.number, **loop)
            assert_same(plain, trial, losses=losses[trial.number])
