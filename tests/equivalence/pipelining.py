"""Recipes for pipelines, and data with as many micro-batches as their steps take.

Imported by tests and, by this name, by the processes of stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import traps
import zoo
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR

from shoal.pipeline.processes import StageProcesses
from shoal.pipeline.run import Trained, run_stages
from shoal.recipes.recipe import Recipe
from shoal.testing import compare, plain_2bw_loop, plain_loop

LR = {"lr": 1e-2}


@dataclass(frozen=True)
class Repeated:
    """A source's training batches, so many of them an epoch, and no validation."""

    source: Any
    count: int

    def __call__(self, hp):
        train, _ = self.source(hp)
        batches = list(train)
        return [batches[i % len(batches)] for i in range(self.count)], None


def decay(optimizer, hp):
    return ExponentialLR(optimizer, 0.8)


def plain_sequence(hp):
    """Eight layers without random draws, to be cut by hand as well."""
    layers = [nn.Linear(12, 16), nn.Tanh()]
    for _ in range(2):
        layers += [nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.LayerNorm(16), nn.Linear(16, 3))


def sgd(named_parameters, hp):
    return torch.optim.SGD([p for _, p in named_parameters], lr=hp["lr"], momentum=0.9)


def classify(output, batch):
    return F.cross_entropy(output, batch[1])


def sequence(micro_batches: int, **changes: Any) -> Recipe:
    """``plain_sequence`` with batches of one shape."""
    settings: dict[str, Any] = {
        "model": plain_sequence,
        "data": Repeated(even_data, 2 * micro_batches),
        "loss": classify,
        "optimizer": sgd,
        "accumulate": micro_batches,
    }
    return Recipe(**(settings | changes))


def even_data(hp):
    return traps.batches([4] * 8), None


def trap(model, micro_batches: int, *, data=traps.data, **changes: Any) -> Recipe:
    """A model of ``traps`` with steps of so many micro-batches, whose shapes differ."""
    settings: dict[str, Any] = {
        "model": traps.Build(model),
        "data": Repeated(data, 2 * micro_batches),
        "loss": traps.loss,
        "optimizer": traps.adamw,
        "accumulate": micro_batches,
    }
    return Recipe(**(settings | changes))


def animal(micro_batches: int, **changes: Any) -> Recipe:
    """A model of ``zoo``: which one is in ``hp["model"]``."""
    settings: dict[str, Any] = {
        "model": zoo.build,
        "data": Repeated(zoo.data, 2 * micro_batches),
        "loss": zoo.loss,
        "optimizer": zoo.make_optimizer,
        "accumulate": micro_batches,
    }
    return Recipe(**(settings | changes))


def assert_alike(
    recipe: Recipe,
    hp: dict[str, Any],
    processes: StageProcesses,
    *,
    steps: int = 3,
    seed: int = 5,
    predict: bool = False,
    **how: Any,
) -> Trained:
    """Train in stages, and compare with the loop that defines the schedule, bit for bit."""
    trained = run_stages(
        recipe, hp, seed, steps=steps, predict=predict, processes=processes, hang_s=60, **how
    )
    options = {"steps": steps, "copies": how.get("width", 1)}
    if how.get("schedule") == "2bw":
        plain = plain_2bw_loop(recipe, hp, seed, predict=predict, **options)
    else:
        plain = plain_loop(recipe, hp, seed, **options)
    found = compare(plain, trained.state, losses=trained.losses)
    assert found.equal, found.first_difference
    for stage, most in enumerate(trained.most_in_flight):
        assert most <= trained.pipeline.bound(stage % trained.pipeline.stages)
    return trained
