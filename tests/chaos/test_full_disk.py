"""A full disk costs generations, never bits: older ones stay, and with room it goes on."""

from __future__ import annotations

import signal

import pytest
import studies
from studies import run, written

import shoal
from shoal.core.errors import StorageError
from shoal.core.event import (
    CheckpointWritten,
    StepFinished,
    StorageFailed,
    StudyFinished,
    TrialFinished,
)
from shoal.execution.run import PATIENCE
from shoal.observe.db import Database
from shoal.runtime.pool import WorkerPool
from shoal.runtime.saving import checkpoint
from shoal.storage.files import Reserve
from shoal.ui.failures import ExitCode, exit_code

EVERY_S = 0.2


@pytest.fixture(scope="module")
def flag(tmp_path_factory):
    """While this file is there, the workers' disk has no room."""
    return tmp_path_factory.mktemp("disk") / "full"


@pytest.fixture(scope="module")
def workers(flag):
    """Workers whose disk can be full, and which take their time over a batch."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(studies.FULL, str(flag))
        environment.setenv(studies.PACE_S, "0.02")
        with WorkerPool() as pool:
            pool.warm(1)
            yield pool


@pytest.fixture
def room(flag):
    """The switch: ``room.touch()`` fills the disk."""
    yield flag
    flag.unlink(missing_ok=True)


def test_a_trial_trains_on_for_some_intervals_then_the_study_ends_with_what_is_saved(
    tmp_path, workers, room, monkeypatch
):
    monkeypatch.setattr("shoal.execution.run.interval_s", lambda every_s, seconds: every_s)
    study = studies.make(tmp_path, kinds=["resident"], epochs=6, checkpoint_every=EVERY_S)

    def fill(event) -> None:
        if isinstance(event, CheckpointWritten):
            room.touch()

    with pytest.raises(StorageError, match="last saved at step") as error:
        run(study, workers, callbacks=[fill])

    assert exit_code(error.value) == ExitCode.STORAGE
    saved = written(study, CheckpointWritten)[-1].step
    kept = checkpoint.generations(study.directory, 0).all()[-1]
    kept.verify()
    assert kept.step == saved
    failures = written(study, StorageFailed)
    assert len(failures) >= 2, "it tried more than once"
    assert "No space left" in failures[0].error
    after = [step for step in written(study, StepFinished) if step.step > saved]
    assert after[-1].time - after[0].time > (PATIENCE - 1) * EVERY_S
    assert "cannot be saved" in written(study, StudyFinished)[-1].stopped
    assert not (study.directory / "reserve").exists()

    room.unlink()
    run(study, workers)
    studies.check_alone(study.directory, 6)


def test_a_disk_that_is_full_at_the_last_save_loses_no_generation(tmp_path, workers, room):
    study = studies.make(tmp_path, kinds=["resident"], epochs=1, checkpoint_every="1h")

    def fill(event) -> None:
        if isinstance(event, StepFinished):
            room.touch()

    with pytest.raises(StorageError, match="did its last step, 10, and cannot be saved"):
        run(study, workers, callbacks=[fill])

    assert not written(study, TrialFinished)
    room.unlink()
    run(study, workers)
    studies.check_alone(study.directory, 1)


def test_a_disk_that_has_room_for_some_saves_again_trains_to_the_end(tmp_path, workers, room):
    study = studies.make(tmp_path, kinds=["resident"], epochs=3, checkpoint_every=EVERY_S)

    def fill(event) -> None:
        if isinstance(event, CheckpointWritten) and not room.exists():
            room.touch()
        elif isinstance(event, StorageFailed):
            room.unlink(missing_ok=True)

    run(study, workers, callbacks=[fill])

    assert written(study, StorageFailed)
    studies.check_alone(study.directory)


def test_an_interrupt_on_a_full_disk_says_what_is_not_saved(tmp_path, workers, room):
    study = studies.make(tmp_path, kinds=["resident"], checkpoint_every="1h")

    def fill(event) -> None:
        if isinstance(event, StepFinished) and event.step == 5:
            room.touch()
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit):
        run(study, workers, callbacks=[fill])

    assert written(study, StorageFailed)
    room.unlink()
    run(study, workers)
    studies.check_alone(study.directory)


def test_a_database_without_room_gets_the_reserve_and_the_study_parks(
    tmp_path, workers, monkeypatch
):
    study = studies.make(tmp_path, kinds=["resident"], checkpoint_every="1h")
    write, release, is_full = Database.write, Reserve.release, []

    def fill(event) -> None:
        if isinstance(event, StepFinished) and event.step == 5:
            is_full.append(event)

    def write_if_room(database, events) -> None:
        if is_full:
            raise StorageError("cannot write study.db: database or disk is full")
        write(database, events)

    def give_back(reserve) -> bool:
        is_full.clear()
        return release(reserve)

    monkeypatch.setattr(Database, "write", write_if_room)
    monkeypatch.setattr(Reserve, "release", give_back)
    with pytest.raises(StorageError, match="disk is full") as error:
        run(study, workers, callbacks=[fill])

    assert exit_code(error.value) == ExitCode.STORAGE
    (failure,) = written(study, StorageFailed)
    assert failure.action == "stops"
    assert "the disk is full" in shoal.open(study.directory).stopped
    steps = [event.step for event in written(study, StepFinished)]
    assert checkpoint.latest(study.directory, 0).step == max(steps), "it was parked and saved"
    monkeypatch.undo()
    run(study, workers)
    studies.check_alone(study.directory)
