"""By whatever rule a trial of a device goes first: the plain bits, in the order of the rule."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import traps
from torch import nn
from watching import Watched

import shoal
from shoal.core.turns import DEFAULT, RULES
from shoal.planning import Planner

STEPS = 8
TECHNIQUE = shoal.Spilled(shards=3, optimizer="host", keep=())
PAUSES_S = (0.01, 0.001)  # of a layer: a step of the first trial takes ten times as long


class Slow(nn.Module):
    """A layer whose forward takes its time."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.linear, self.pause_s = nn.Linear(16, 16), pause_s

    def forward(self, x):
        time.sleep(self.pause_s)
        return self.linear(x).tanh()


def _model(hp):
    inner = [Slow(hp["pause_s"]) for _ in range(6)]
    return nn.Sequential(nn.Linear(12, 16), *inner, nn.Linear(16, 3))


@pytest.fixture
def train(run_study, assert_alone, monkeypatch):
    """Train two trials by a rule, compare with the plain loop; every unit, in order of start."""
    plan = Planner.plan

    def run(rule, **options):
        def planned(planner, trials, **asked):
            found = plan(planner, trials, **asked)
            return replace(found, plan=replace(found.plan, active=2, rule=rule))

        monkeypatch.setattr(Planner, "plan", planned)
        recipe = shoal.Recipe(
            model=_model, data=traps.data, loss=traps.loss, optimizer=traps.adamw
        )
        seen = Watched()
        report = run_study(
            recipe,
            shoal.grid(pause_s=list(PAUSES_S), lr=[1e-2]),
            steps=STEPS,
            technique=TECHNIQUE,
            callbacks=[seen],
            timeline=True,
            **options,
        )
        assert_alone(report, report.trials, recipe, steps=STEPS)
        units = [event for event in seen.actions if event.action.startswith(("F ", "B "))]
        return sorted(units, key=lambda event: event.start)

    return run


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", RULES)
def test_a_mix_trains_to_the_plain_bits_by_every_rule(rule, train):
    train(rule, poison=True)


@pytest.mark.full
def test_units_run_in_the_order_of_the_rule(train):
    """The short trial's steps are over soon, or wait until the long one has as little left."""

    def soon(rule):
        units = train(rule)
        long, short = ([unit.start for unit in units if unit.trial == n] for n in (0, 1))
        middle = long[len(long) // 2]
        return sum(start < middle for start in short) / len(short)

    # units of milliseconds: a busy machine may be late with copies throughout
    assert any(soon("shortest step first") > soon(DEFAULT) + 0.3 for _ in range(3))


SHAPES = {"short": (2, 64, 800), "long": (6, 64, 2000), "host": (4, 96, 200)}
"""Layers, their width, rows of a batch."""


def _of_shape(hp):
    layers, width, _ = SHAPES[hp["shape"]]
    inner = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(nn.Linear(12, width), *inner, nn.Linear(width, 3))


def _rows(hp):
    generator = torch.Generator().manual_seed(1)
    x_BF = torch.randn(3, SHAPES[hp["shape"]][2], 12, generator=generator)
    return [(x, x[:, :3].round()) for x in x_BF], None


def _loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])


@pytest.mark.full
def test_the_planner_names_the_rule_that_its_replay_finds_best(
    tmp_path, warm_workers, assert_alone
):
    """On an emulated device, where no clock says what a unit takes."""
    recipe = shoal.Recipe(model=_of_shape, data=_rows, loss=_loss, clip_grad_norm=1.0)
    space = shoal.grid(shape=list(SHAPES), lr=[1e-2])
    study = shoal.Study("mix", recipe, space=space, steps=3, directory=tmp_path)
    options = {
        "hardware": shoal.Hardware.emulated("h200", memory="16MiB", scale=50),
        "technique": TECHNIQUE,
        "workers": warm_workers,
    }

    plan = study.plan(**options)

    assert plan.rule == "most steps left first"
    assert f"up to {plan.active} at a time on each, {plan.rule}; predicted" in plan.explain()
    assert all(f"go {plan.rule}: on paper they take " in job.why[-1] for job in plan.jobs)
    report = study.run(**options, progress=False)
    assert_alone(report, report.trials, recipe, steps=3)
