"""Recipes for trials with replicas, and what those of a study must end on.

Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

from typing import Any

import pytest
import staging
import torch
import traps
from torch import nn

from shoal.recipe import Recipe
from shoal.testing import assert_same, plain_data_parallel_loop
from shoal.verify import read_losses

LR = {"lr": 1e-2}


def recipe(kind: type[nn.Module] = traps.Chain, accumulate: int = 1, **changes: Any) -> Recipe:
    """A model of ``traps`` whose batches may be cut; the last one of an epoch is short."""
    return staging.trap(kind, accumulate, **({"splittable": True} | changes))


def rich(accumulate: int = 2, **changes: Any) -> Recipe:
    """Dropout, clipping, a schedule of the rate, and validation."""
    return staging.rich(accumulate, **({"splittable": True} | changes))


def uneven(hp):
    """Batches of 7, 4, 1 and 5 rows: some replicas have a row less, or none."""
    return traps.batches([7, 4, 1, 5]), traps.batches([4, 3, 4], 30)


class Still(traps.Chain):
    """No row's result depends on other rows, or on random numbers."""

    def make_block(self, index: int) -> nn.Module:
        return nn.Sequential(nn.Linear(traps.WIDTH, traps.WIDTH), nn.GELU())


class Tied(traps.Chain):
    """The first block and the last one are one module, and two more share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[-1] = self.blocks[0]
        self.blocks[2][0].weight = self.blocks[1][0].weight


class Normal(traps.Chain):
    """BatchNorm, whose statistics are of a replica's rows."""

    def make_block(self, index: int) -> nn.Module:
        return nn.Sequential(nn.Linear(traps.WIDTH, traps.WIDTH), nn.BatchNorm1d(traps.WIDTH))


class Rebinding(traps.Chain):
    """Has a buffer that each forward replaces, and does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.seen = self.seen + x.detach().sum()
        return super().forward(x) + 0 * self.seen


class Branching(traps.Chain):
    """Which block is used follows from the rows; so replicas use different ones."""

    def forward(self, x):
        x = self.enter(x)
        number = 0 if float(x.detach().sum()) > 0 else 1
        return self.leave(self.blocks[number](x))


class InDouble(Still):
    def __init__(self) -> None:
        super().__init__()
        self.double()


def doubled(hp):
    """Batches of 5 and 8 rows in float64."""
    drawn = traps.batches([5, 8, 8, 6])
    return [(x.double(), y) for x, y in drawn], None


def halves(named_parameters, hp):
    """Adafactor looks at a parameter's rows and columns as wholes."""
    return torch.optim.Adafactor([p for _, p in named_parameters], lr=hp["lr"])


def summed(output, batch):
    """A loss that is no mean over rows."""
    return nn.functional.cross_entropy(output, batch[1], reduction="sum")


def sharpened(output, batch):
    """A loss that is nearly a mean over rows."""
    return traps.loss(output, batch) * (1 + 1e-3 * len(batch[1]))


def assert_replicated(report, recipe: Recipe, technique, trials=None, **loop: Any) -> None:
    """These trials, or all, ended on the bits of the rule of replicas."""
    losses = read_losses(report.directory)
    for trial in report.trials if trials is None else trials:
        if trial.error:
            pytest.fail(f"{trial.error_line}\ntrial {trial.number}, {trial.hp}: {trial.error}")
        assert trial.state == "FINISHED"
        assert_same(ruled(recipe, trial, technique, **loop), trial, losses=losses[trial.number])


def ruled(recipe: Recipe, trial, technique, **loop: Any):
    """A trial trained in one process, replica after replica."""
    options = {"width": technique.width, "sharded": technique.shard, **loop}
    return plain_data_parallel_loop(recipe, trial.hp, trial.seed, **options)
