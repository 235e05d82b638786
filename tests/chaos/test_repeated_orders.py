"""``extend`` and ``clone``, killed at delicate instants and typed again, add trials once."""

from __future__ import annotations

import pytest
import studies
from processes import Runner

import shoal
from shoal.control import ExtendTrials, send
from shoal.core.errors import SpecError
from shoal.core.event import StepFinished
from shoal.launch.directory import read_record

RATES = [3e-3, 1e-2, 1e-3, 3e-2, 3e-4]
PLANNED = "kill after WorkerStarted"  # nothing is on record yet
RECORDED = "kill before TrialPlanned"  # the record is written, no event says so yet
RUNNING = "kill after CheckpointWritten"


def make(folder, **options) -> Runner:
    """A study of one trial in a space of five."""
    settings = {"kinds": ["resident"], "lr": RATES, "trials": 1, "epochs": 1}
    return Runner(folder, devices=1, **settings | {"checkpoint_every": 0} | options)


def give(runner: Runner, verb: str, *words: str, hook: str = "") -> int:
    return runner.start(hook, verb=verb, words=words).wait()


def numbers(runner: Runner, origin: str) -> list[int]:
    """The trials on record that are there for a reason."""
    record = read_record(runner.place)
    return [trial.number for trial in record.trials if trial.origin == origin]


@pytest.mark.full
def test_an_extension_killed_at_each_delicate_instant_adds_its_trials_once(tmp_path):
    runner = make(tmp_path)
    assert runner.run() == 0, runner.words()
    for instant, recorded in ((PLANNED, []), (RECORDED, [1, 2]), (RUNNING, [1, 2])):
        assert give(runner, "extend", "--trials", "2", hook=instant) == -9, runner.words()
        assert numbers(runner, "extended") == recorded

    assert give(runner, "extend", "--trials", "2") == 0, runner.words()

    assert numbers(runner, "extended") == [1, 2]
    assert "trials 1, 2 were added by the same command on " in runner.words()
    studies.check_alone(runner.place, 1)

    assert give(runner, "extend", "--to", "3") == 0, runner.words()
    assert numbers(runner, "extended") == [1, 2]
    assert give(runner, "extend", "--trials", "2") == 0, runner.words()
    assert numbers(runner, "extended") == [1, 2, 3, 4]
    assert "added trials 3, 4; trials 1, 2, which the same command added on " in runner.words()
    assert give(runner, "extend", "--to", "4") == 2
    assert "cannot extend study 'k' to 4 trials: it has 5" in runner.words()
    studies.check_alone(runner.place, 1)


@pytest.mark.full
def test_an_extension_to_a_number_killed_when_it_is_recorded_has_that_number(tmp_path):
    runner = make(tmp_path)
    assert runner.run() == 0, runner.words()
    assert give(runner, "extend", "--to", "3", hook=RECORDED) == -9

    assert give(runner, "extend", "--to", "3") == 0, runner.words()

    assert numbers(runner, "extended") == [1, 2]
    assert "has 3 trials already: none was added; going on with trials 1, 2" in runner.words()
    studies.check_alone(runner.place, 1)


@pytest.mark.parametrize(
    "words", [(), pytest.param(("--cold",), marks=pytest.mark.full)], ids=["warm", "cold"]
)
@pytest.mark.full
def test_a_clone_killed_when_it_is_recorded_is_made_once(tmp_path, words):
    runner = make(tmp_path)
    assert runner.run(RUNNING) == -9
    words = ("0", "--set", "lr=0.02", *words)
    for instant, recorded in ((PLANNED, []), (RECORDED, [1]), (RECORDED, [1])):
        assert give(runner, "clone", *words, hook=instant) == -9, runner.words()
        assert numbers(runner, "cloned") == recorded

    assert give(runner, "clone", *words) == 0, runner.words()

    assert numbers(runner, "cloned") == [1]
    assert "trial 1 was added by the same command on " in runner.words()
    report = shoal.open(runner.place)
    assert [trial.state for trial in report.trials] == ["FINISHED", "FINISHED"]
    assert report.trials[1].hp["lr"] == 0.02
    steps = [e.step for e in runner.events() if isinstance(e, StepFinished) and e.trial == 1]
    assert (steps[0] == 1) is ("--cold" in words)
    if "--cold" in words:
        studies.check_alone(runner.place, 1)


@pytest.mark.slow
def test_an_extension_of_a_study_that_dies_before_it_answers_is_not_added_twice(tmp_path):
    runner = make(tmp_path, epochs=8)  # long enough to be asked for more
    process = runner.start("kill before StudyChanged", **{studies.PACE_S: "0.02"})
    process.wait_for("StepFinished")
    with pytest.raises(SpecError, match="ended before it answered"):
        send(runner.place, ExtendTrials(trials=1))
    assert process.wait() == -9
    assert numbers(runner, "extended") == [1]

    assert give(runner, "extend", "--trials", "1") == 0, runner.words()

    assert numbers(runner, "extended") == [1]
    assert "trial 1 was added by the same command on " in runner.words()
