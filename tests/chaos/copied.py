"""Trials with replicas, with the traps of ``staged`` for their workers.

Imported by tests and, by this name, by the files of ``processes.Runner``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import staged

import shoal
from shoal.recipes.recipe import Recipe
from shoal.testing import assert_same, plain_data_parallel_loop
from shoal.verify import read_losses

WIDTH = 2


def recipe(**changes: Any) -> Recipe:
    return staged.recipe(**({"splittable": True, "accumulate": 2} | changes))


def technique(shard: bool) -> shoal.DataParallel:
    return shoal.DataParallel(width=WIDTH, shard=shard)


class Copied(shoal.Study):
    """A study that the command line runs with replicas too."""

    shard = False

    def run(self, **request: Any) -> shoal.Report:
        asked = request.pop("technique", None) or technique(self.shard)
        return super().run(technique=asked, **request)


def make(directory, *, lr=(1e-2, 3e-3), shard: bool = False, **options) -> Copied:
    """The study: 6 steps an epoch."""
    space = shoal.grid(lr=list(lr), width=[staged.WIDTH])
    settings = {"epochs": 3, "checkpoint_every": 0} | options
    study = Copied("k", recipe(), space=space, directory=directory, **settings)
    study.shard = shard
    return study


@functools.cache
def _alone(shard: bool, lr: float, seed: int, epochs: int):
    hp = {"lr": lr, "width": staged.WIDTH}
    options = {"width": WIDTH, "sharded": shard, "epochs": epochs}
    return plain_data_parallel_loop(recipe(), hp, seed, **options)


def check_alone(place: Path, shard: bool = False, epochs: int = 3, trials=None) -> None:
    """These trials, or all, finished on the bits of the rule: state, every loss, every metric."""
    report = shoal.open(place, recipe())
    losses = read_losses(place)
    for trial in report.trials:
        if trials is not None and trial.number not in trials:
            continue
        assert trial.state == "FINISHED", trial.error or trial
        plain = _alone(shard, trial.hp["lr"], trial.seed, epochs)
        assert_same(plain, trial, losses=losses[trial.number])
