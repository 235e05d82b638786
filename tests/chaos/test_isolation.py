"""One trial's accident is its own: the others end on the bits they would have had alone."""

from __future__ import annotations

import accidents
import pytest

import shoal
from shoal.core.event import TrialRestarted

STEPS = 9
TECHNIQUES = {"resident": "resident", "spilled": shoal.Spilled(shards=3)}
WORDS = {
    "raise": ("RuntimeError", "the model gave up", "happen"),  # type, message, a frame of it
    "nan": ("loss of step 3 is nan", "Lower the learning rate"),
    "data": ("OSError", "the disk is gone", "__iter__"),
}
PLACES = [("resident", 1), ("spilled", 1), ("spilled", 2)]


@pytest.fixture
def check(run_study, assert_alone):
    """Run a study of accidents; trials that met with none must end on the plain bits."""

    def run(kinds, technique, *, survivors=("none",), extra=None, steps=STEPS, **options):
        space = shoal.grid(accident=kinds, lr=[0.01, 0.003]) | (extra or {})
        recipe = accidents.recipe()
        technique = TECHNIQUES[technique]
        report = run_study(recipe, space, steps=steps, technique=technique, **options)
        alive = [trial for trial in report.trials if trial.hp["accident"] in survivors]
        assert alive
        assert_alone(report, alive, recipe, steps=steps)
        return [trial for trial in report.trials if trial not in alive]

    return run


@pytest.mark.parametrize(("technique", "devices"), PLACES)
def test_an_accident_fails_its_trial_alone_with_its_traceback(technique, devices, check):
    for trial in check(["none", *WORDS], technique, devices=devices):
        assert trial.state == "FAILED"
        for words in WORDS[trial.hp["accident"]]:
            assert words in trial.error


@pytest.mark.parametrize("accident", ["build", "first"])
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_model_that_cannot_even_begin_fails_alone(technique, accident, check):
    for trial in check([accident, "none"], technique):
        assert trial.state == "FAILED"
        assert "ValueError: the model cannot begin" in trial.error


@pytest.mark.sample(2)
@pytest.mark.parametrize(("technique", "devices"), PLACES)
def test_a_worker_killed_with_9_costs_time_and_no_bits(technique, devices, check, tmp_path):
    flag = tmp_path / "killed"
    survivors = ("kill", "none")
    check(survivors, technique, survivors=survivors, devices=devices, extra={"flag": str(flag)})
    assert flag.exists()


@pytest.mark.parametrize("source", ["in order", "shuffled", "own generator"])
def test_a_trial_goes_on_from_its_last_saved_state_to_the_same_bits(source, check, tmp_path):
    """Saved after every step, killed in its second epoch: the data must go on in place."""
    flag, restarts = tmp_path / "killed", []

    def listen(event):
        if isinstance(event, TrialRestarted):
            restarts.append(event.step)

    check(
        ["kill late"],
        "spilled",
        survivors=["kill late"],
        extra={"flag": str(flag), "source": source, "lr": 0.01},
        steps=15,
        checkpoint_every=0,
        callbacks=[listen],
    )
    assert flag.exists()
    assert restarts in ([8], [9])


def test_a_model_that_exits_fails_alone_and_takes_no_worker_along(check):
    for trial in check(["exit", "none"], "spilled"):
        assert trial.state == "FAILED"
        assert "SystemExit: the model left" in trial.error


@pytest.mark.full
def test_a_trial_that_kills_every_worker_is_given_up(check):
    for trial in check(["kill again", "none"], "spilled", devices=2):
        assert trial.state == "FAILED"
        assert "worker" in trial.error
