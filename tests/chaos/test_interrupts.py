"""Ctrl-C and SIGTERM: saved within the grace period, exit code 75, and on to the same bits."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import studies
from processes import Runner, until
from studies import run

import shoal
from shoal.core.event import CheckpointWritten, StepFinished, TrialFinished, WorkerDied

pytestmark = pytest.mark.clock

PAUSED = 75
SLOWLY = {studies.PACE_S: "0.03"}


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """A study that tests interrupt one after the other, and the last one ends."""
    return Runner(tmp_path_factory.mktemp("interrupts"), epochs=4, checkpoint_every="1h")


def last_steps(events, kind) -> dict[int, int]:
    found: dict[int, int] = {}
    for event in events:
        if isinstance(event, kind):
            found[event.trial] = max(found.get(event.trial, 0), event.step)
    return found


def check_saved(runner: Runner) -> None:
    """What is on record as done is on the disk."""
    events = runner.events()
    assert last_steps(events, CheckpointWritten) == last_steps(events, StepFinished)


def test_an_interrupt_during_planning_leaves_no_trace_of_a_new_study(tmp_path):
    runner = Runner(tmp_path, devices=1, kinds=("resident",))
    process = runner.start("planning")
    until((tmp_path / "planning").exists, "it never planned")

    process.send(signal.SIGINT)

    assert process.wait() == PAUSED, runner.words()
    assert list((tmp_path / "runs").iterdir()) == []
    assert runner.words().endswith(
        "stopped before anything was trained, so there is no study yet; the same command begins it"
        "\n"
    )
    process.check_nothing_left()


def test_a_terminals_interrupt_saves_every_trial_and_exits_with_75(runner):
    process = runner.start(**SLOWLY)
    process.wait_for("StepFinished", 5)

    process.send(signal.SIGINT, group=True)

    assert process.wait() == PAUSED, runner.words()
    check_saved(runner)
    assert "trials from where they stand: shoal resume" in runner.printed.read_text()
    assert "stopped; what was saved stays, and the same command goes on" in runner.words()
    assert shoal.open(runner.place).stopped == "SIGINT was received"
    assert not any(isinstance(event, WorkerDied) for event in runner.events())
    process.check_nothing_left()


@pytest.mark.full
def test_workers_ignore_sigterm_and_the_studys_process_saves_on_it(runner):
    process = runner.start(**SLOWLY)
    process.wait_for("StepFinished", 3)
    workers = process.workers()
    assert len(workers) == 2

    for pid in workers:
        process.send_to(pid, signal.SIGTERM)

    process.wait_for("StepFinished", 9)
    process.send(signal.SIGTERM)
    assert process.wait() == PAUSED, runner.words()
    check_saved(runner)
    assert shoal.open(runner.place).stopped == "SIGTERM was received"
    assert not any(isinstance(event, WorkerDied) for event in runner.events())


def test_a_second_interrupt_leaves_at_once(runner):
    block = runner.folder / "block"
    process = runner.start(**SLOWLY, **{studies.BLOCK: str(block)})
    process.wait_for("TrialResumed")
    block.touch()  # from now on no step ends, so there is nothing to save within the grace
    until(Path(f"{block}.reached").exists, "no trial came to a batch")
    process.send(signal.SIGINT)
    assert not process.is_over_after(0.5)

    process.send(signal.SIGINT)

    assert process.wait(deadline_s=10.0) == PAUSED, runner.words()
    process.check_nothing_left()


def test_an_interrupted_study_ends_on_the_same_bits(runner):
    if not runner.place.exists():
        pytest.skip("it goes on from where the tests above left the study")

    assert runner.run() == 0, runner.words()

    studies.check_alone(runner.place, 4)
    assert runner.kinds().count("TrialFinished") == 3
    assert shoal.open(runner.place).stopped == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_script_exits_with_75_when_everything_is_saved(number, tmp_path, warm_workers):
    study = studies.make(tmp_path, kinds=["resident"], checkpoint_every="1h")

    def interrupt(event) -> None:
        if isinstance(event, StepFinished) and event.step == 3:
            signal.raise_signal(number)

    with pytest.raises(SystemExit) as ending:
        run(study, warm_workers, callbacks=[interrupt])

    assert ending.value.code == PAUSED
    report = study.report()
    assert report.stopped == f"{number.name} was received"
    assert report.trials[0].checkpoint is not None
    assert signal.getsignal(number) is not None
    assert run(study, warm_workers).stopped == ""
    studies.check_alone(study.directory)


def test_an_interrupt_that_comes_with_the_last_step_takes_nothing_back(tmp_path, warm_workers):
    study = studies.make(tmp_path, kinds=["resident"], epochs=1)

    def interrupt(event) -> None:
        if isinstance(event, TrialFinished):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit):
        run(study, warm_workers, callbacks=[interrupt])

    studies.check_alone(study.directory, 1)
    assert run(study, warm_workers).stopped == ""
