"""A disk budget that a plan finds sufficient suffices to the end, and no less was said."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.errors import PlanError
from shoal.core.event import CheckpointWritten

WIDTH = 160  # beside its state what else a generation has is small
SPACE = {"lr": shoal.log_uniform(1e-3, 1e-1)}
UNITS = {"KiB": 2**10, "MiB": 2**20}


def model(hp):
    layers = (nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(WIDTH, 2))


def data(hp):
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(16, 4, generator=draws)
    rows = TensorDataset(x, (x[:, 0] > 0).long())
    return DataLoader(rows, 8, shuffle=True), DataLoader(rows, 8)


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def frozen(hp):
    """A model most of which is not trained: the same bits in all trials, or each its own."""
    draws = torch.Generator().manual_seed(int(1e6 * hp["lr"]) if hp.get("own") else 5)
    base = nn.Linear(4, 520), nn.Linear(520, 520)
    for parameter in (p for layer in base for p in layer.parameters()):
        parameter.requires_grad_(False)
        parameter.copy_(torch.randn(parameter.shape, generator=draws) / 20)
    return nn.Sequential(*base, nn.Linear(520, 2))


RECIPE = shoal.Recipe(model=model, data=data, loss=loss)
FROZEN = shoal.Recipe(model=frozen, data=data, loss=loss)


@dataclass
class Bench:
    """Runs studies on one device, saved after each step."""

    tmp_path: object
    workers: object
    most: int = 0
    recipe: shoal.Recipe = RECIPE

    def run(self, budget, **asked):
        asked = {"space": SPACE, "epochs": 4, "checkpoint_every": 0, **asked}
        study = shoal.Study(
            "it", self.recipe, directory=self.tmp_path, disk_budget=budget, **asked
        )
        hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
        return study.run(hardware=hardware, workers=self.workers, callbacks=[self._look])

    def needed(self, **asked):
        """What a plan says that is to suffice, to what its words are rounded to."""
        with pytest.raises(PlanError) as refused:
            self.run(1, **asked)
        number, unit = re.search(r"need ([\d.]+) (\w+) on disk", str(refused.value)).groups()
        return int((float(number) + 0.05) * UNITS[unit])

    def _look(self, event):
        if isinstance(event, CheckpointWritten):
            self.most = max(self.most, self._bytes())

    def _bytes(self):
        """Of all generations that are there; a file that two have counts once."""
        sizes = {}
        for place, _, names in os.walk(self.tmp_path / "it" / "trials"):
            for name in names:
                try:
                    status = os.stat(os.path.join(place, name))
                except FileNotFoundError:  # it was let go of meanwhile
                    continue
                sizes[status.st_ino] = status.st_size
        return sum(sizes.values())


@pytest.fixture
def bench(tmp_path, warm_workers):
    return Bench(tmp_path, warm_workers)


@pytest.mark.sample(2)
@pytest.mark.parametrize("keep_finished", ["best:1", "weights", "all"])
def test_a_budget_is_held_against_the_trials_that_a_sampler_will_ask_for_too(bench, keep_finished):
    pytest.importorskip("optuna")
    asked = {"sampler": "tpe", "trials": 8, "generation": 2, "keep_finished": keep_finished}
    budget = bench.needed(**asked)

    report = bench.run(budget, **asked)

    assert report.count("FINISHED") == 8
    assert bench.most <= budget


def test_of_the_best_trials_those_of_earlier_runs_leave_their_room_to_better_ones(bench):
    asked = {"keep_finished": "best:2", "trials": 6}
    budget = bench.needed(**asked)
    bench.run(budget, **{**asked, "trials": 3})

    report = bench.run(budget, **asked)

    assert report.count("FINISHED") == 6
    assert bench.most <= budget


@pytest.mark.parametrize("keep_finished", ["best:1", "weights"])
@pytest.mark.parametrize("pruner", ["median", shoal.PBT(interval=1, quantile=0.25)])
def test_trials_that_wait_for_each_other_are_within_the_budget(bench, pruner, keep_finished):
    asked = {"pruner": pruner, "trials": 6, "keep_finished": keep_finished}
    budget = bench.needed(**asked)

    report = bench.run(budget, **asked)

    assert report.count("FAILED") == 0
    assert bench.most <= budget


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2])
def test_what_those_of_earlier_runs_share_with_later_ones_is_not_asked_for_again(bench, keep):
    """Also where one trial is left, which has nobody beside it that shares."""
    bench.recipe = FROZEN
    asked = {"keep": keep, "trials": 6}
    budget = bench.needed(**asked)

    for trials in (3, 5, 6):
        report = bench.run(budget, **{**asked, "trials": trials})

        assert report.count("FINISHED") == trials
    assert bench.most <= budget


@pytest.mark.parametrize("own", [False, True])
def test_what_is_not_trained_counts_once_where_all_trials_are_known_to_have_it(bench, own):
    bench.recipe = FROZEN
    asked = {"trials": 6, "space": {**SPACE, "own": shoal.choice(own)}}
    budget = bench.needed(**asked)

    report = bench.run(budget, **asked)

    assert report.count("FINISHED") == 6
    assert bench.most <= budget
    base = 4 * 520 * 520
    assert (budget < 6 * base) is (not own)
    assert (bench.most < 6 * base) is (not own)
