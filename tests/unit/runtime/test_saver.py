"""What a saver leaves on the disk while the record lags behind it."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal.core.event import CheckpointWritten
from shoal.runtime.saving import checkpoint
from shoal.runtime.saving.checkpoint import STATE, WEIGHTS, Content, generations
from shoal.runtime.saving.saver import Saver
from shoal.runtime.wire.messages import Settings


class Record:
    """Counts messages, and says of how many it is safe."""

    def __init__(self) -> None:
        self.said = self.heard = 0
        self.written: list[int] = []

    def tell(self, event) -> None:
        assert isinstance(event, CheckpointWritten)
        self.written.append(event.step)
        self.said += 1


@pytest.fixture
def record():
    return Record()


def settings_of(tmp_path, every_s):
    return Settings(
        steps=10,
        epochs=None,
        eval_every=None,
        directory=str(tmp_path),
        timeline=False,
        checkpoint_every_s=every_s,
        keep=1,
        keep_finished="all",
    )


@pytest.fixture
def save(tmp_path, record):
    """A function that saves a step of trial 0, keeping one generation, and says which are left."""
    settings = settings_of(tmp_path, 0.0)
    saver = Saver(settings, record.tell, said=lambda: record.said, heard=lambda: record.heard)

    def run(step):
        files = {WEIGHTS: {"w": torch.full((4,), float(step))}, STATE: {"s": torch.zeros(2)}}
        saver.save(lambda: Content(0, step, files, {"trial": 0}))
        outcome = saver.wait(0)
        assert outcome.trouble == ""
        return [generation.step for generation in generations(tmp_path, 0).all()]

    yield run
    saver.close()


def test_the_newest_generation_on_record_stays_until_a_newer_one_is(save, record):
    assert save(1) == [1]
    record.heard = record.said
    assert save(2) == [1, 2]  # nobody knows of the second yet
    assert save(3) == [1, 3]
    record.heard = 2  # of the second, which is gone
    assert save(4) == [1, 4]
    record.heard = record.said
    assert save(5) == [4, 5]


def test_without_any_on_record_there_is_nothing_to_spare(save):
    assert save(1) == [1]
    assert save(2) == [2]


def test_what_another_worker_saved_is_on_record(save, tmp_path, record):
    with generations(tmp_path, 0).begin(7) as draft:
        draft.tensors(WEIGHTS, [])
        draft.commit(trial=0)
    assert save(8) == [7, 8]
    assert save(9) == [7, 9]
    record.heard = record.said
    assert save(10) == [9, 10]


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk that writes when it is told to; and what it was asked to write."""
    may_write, asked = threading.Event(), []
    real = checkpoint.write

    def write(what, place, shared):
        asked.append(what.trial)
        assert may_write.wait(10)
        return real(what, place, shared)

    monkeypatch.setattr(checkpoint, "write", write)
    yield may_write, asked
    may_write.set()


def state_of(trial):
    return Content(trial, 1, {WEIGHTS: {"w": torch.ones(4)}, STATE: {"s": torch.zeros(2)}}, {})


def test_of_the_trials_that_are_copied_one_waits_until_the_other_is_written(
    tmp_path, record, slow_disk
):
    may_write, _ = slow_disk
    saver = Saver(settings_of(tmp_path, 100.0), record.tell)
    for trial in range(2):
        saver.expect(trial, 0.0)
    assert saver.is_due(1, copies=True)
    saver.save(lambda: state_of(0), copies=True)

    assert not saver.is_due(1, copies=True)
    assert saver.is_due(1)  # one that is written from where it is
    may_write.set()
    saver.wait(0)
    assert saver.is_due(1, copies=True)
    saver.close()


def test_what_went_wrong_with_one_trials_copy_is_not_anothers(tmp_path, record, monkeypatch):
    def broken(what, place, shared):
        raise MemoryError("of trial 0")

    saver = Saver(settings_of(tmp_path, 0.0), record.tell)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write", broken)
        saver.save(lambda: state_of(0), copies=True)
        with pytest.raises(MemoryError, match="of trial 0"):
            saver.wait(0)
    saver.save(lambda: state_of(1), copies=True)
    assert saver.wait(1).trouble == ""
    saver.close()


def test_saved_each_step_a_copy_is_taken_when_the_one_before_is_written(
    tmp_path, record, slow_disk
):
    may_write, asked = slow_disk
    saver, taken = Saver(settings_of(tmp_path, 0.0), record.tell, may_write.set), []
    saver.save(lambda: state_of(0), copies=True)
    assert saver.is_due(1, copies=True)

    def take():
        taken.append(may_write.is_set())
        return state_of(1)

    saver.save(take, copies=True)  # whose waiting, told each second, lets the disk write
    assert taken == [True]
    saver.wait(1)
    assert asked == [0, 1]
    saver.close()
