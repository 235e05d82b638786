"""Recipes for trials with replicas, and what those of a study must end on.

Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import staging
import torch
import traps
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.core.errors import TrialError
from shoal.recipes.recipe import Recipe
from shoal.runtime.gangs.replicaseat import ReplicaSeat
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


class BranchingInEvaluation(traps.Chain):
    """How many blocks are used follows from the rows, of validation batches only."""

    def forward(self, x):
        if self.training:
            return super().forward(x)
        x = self.enter(x)
        for block in self.blocks[:1] if float(x.sum()) > 0 else self.blocks:
            x = block(x)
        return self.leave(x)


class CountsCalls(traps.Chain):
    """Has a buffer that evaluations write to as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Reentrant(traps.Chain):
    """Checkpoints its blocks as torch first did."""

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.leave(x)


class OfWidth(nn.Module):
    """A shape of its own for each width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, width), nn.GELU(), nn.Linear(width, 3))

    def forward(self, x):
        return self.net(x)


def of_width(hp):
    return OfWidth(int(hp["width"]))


def of_width_or_misfit(hp):
    """The widest one fails where its replicas are measured, with what fails a trial."""
    return Misfit(int(hp["width"])) if hp["width"] == 9 else of_width(hp)


class Misfit(OfWidth):
    def forward(self, x):
        if len(x) < 4:  # a replica's rows
            raise TrialError("only whole batches, please")
        return super().forward(x)


def slow_loss(output, batch):
    time.sleep(0.004)
    return traps.loss(output, batch)


class Refilled:
    """Batches in one buffer, which is filled again for each."""

    def __init__(self, batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        x, y = (tensor.clone() for tensor in self.batches[0])
        for here, there in self.batches:
            x.copy_(here)
            y.copy_(there)
            yield x, y


def refilled(hp):
    return traps.batches([4] * 4), Refilled(traps.batches([4, 4, 4, 4, 4], 30))


class Fleeting:
    """Fifteen batches of five rows, made when asked for; fails where many of them are kept."""

    def __len__(self) -> int:
        return 15

    def __iter__(self):
        drawn = traps.batches([5], 30)[0]
        shape = drawn[0].shape
        for _ in range(15):
            count = sum(type(o) is torch.Tensor and o.shape == shape for o in gc.get_objects())
            if count > 9:
                raise RuntimeError(f"{count} validation batches are kept")
            yield tuple(tensor.clone() for tensor in drawn)


def fleeting(hp):
    return traps.batches([4] * 4), Fleeting()


def named(hp):
    drawn = traps.batches([4] * 4)
    return [{"x": x, "y": y, "names": list("abcd")} for x, y in drawn], None


def only_x(batch):
    return (batch["x"],)


def loss_of_named(output, batch):
    return nn.functional.cross_entropy(output, batch["y"])


def seats_alive(output, batch):
    """A metric: the seats of replicas in this process."""
    gc.collect()
    return float(sum(type(one) is ReplicaSeat for one in gc.get_objects()))


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
