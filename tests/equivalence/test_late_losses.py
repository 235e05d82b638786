"""Losses that come late, as a GPU's: the plain bits, one wait a step, and no step too many."""

from __future__ import annotations

import os

import lateness
import pytest

import shoal
from shoal.runtime.pool import WorkerPool

STEPS = 4
WAYS = {
    "resident": "resident",
    "device": shoal.Spilled(shards=3, optimizer="device"),
    "host": shoal.Spilled(shards=3, optimizer="host", keep=()),
}


NOTES = ["note", "note"]


@pytest.fixture(scope="module")
def late_workers():
    """Workers of these tests alone: losses come late in them from then on."""
    with WorkerPool() as pool:
        yield pool


@pytest.fixture
def train(run_study, tmp_path, late_workers):
    """A function that trains a trial without and one with an accident; and what each one did."""

    def run(way, recipe):
        space = shoal.grid(accident=["none", "nan"], lr=[0.01])
        report = run_study(
            recipe,
            space | {"folder": str(tmp_path), "tests": os.getpid()},
            steps=STEPS,
            technique=WAYS[way],
            workers=late_workers,
        )
        return report, *(lateness.steps_of(tmp_path / kind) for kind in ("none", "nan"))

    return run


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("way", "clip", "precision"),
    [
        ("resident", None, "fp32"),
        ("device", None, "fp32"),
        ("host", None, "fp32"),
        ("host", 0.5, "fp32"),
        ("host", 0.5, "bf16"),
    ],
)
def test_a_step_waits_once_and_a_loss_that_is_not_finite_stops_before_it(
    way, clip, precision, train, assert_alone
):
    recipe = lateness.recipe(clip_grad_norm=clip, precision=precision)
    report, good, bad = train(way, recipe)
    by_kind = {trial.hp["accident"]: trial for trial in report.trials}

    assert_alone(report, [by_kind["none"]], recipe, steps=STEPS)
    assert len(good) == STEPS
    for step in [*good, bad[0]]:
        assert step[:4] == [*NOTES, "wait", "step"]
        assert step.count("wait") == 1
    assert bad[1:] == [[*NOTES, "wait"]]
    assert "TrialError: the loss of step 2 is nan; the trial stops" in by_kind["nan"].error


@pytest.mark.parametrize("way", ["resident", "host"])
def test_where_any_loss_will_do_it_is_waited_for_when_the_step_is_over(way, train, assert_alone):
    recipe = lateness.recipe(on_nonfinite="ignore")
    report, good, bad = train(way, recipe)

    assert_alone(report, report.trials, recipe, steps=STEPS)
    assert len(good) == len(bad) == STEPS
    for step in [*good, *bad]:
        assert step[:2] == NOTES
        assert step.count("wait") == 1
        assert way == "host" or step[-2:] == ["step", "wait"]
