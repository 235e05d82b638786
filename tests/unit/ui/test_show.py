"""One trial, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.core.event import CheckpointWritten, Event, StudyFinished, TrialFinished
from shoal.observe import Database
from shoal.observe.snapshot import Snapshot
from shoal.ui.show import describe_trial, study_state, unsaved_lines

Events = Callable[..., Iterator[Event]]


@pytest.mark.parametrize(
    ("technique", "shards", "array", "words"),
    [
        ("Resident", 1, "slot 3 of 4", "slot 3 of an array of 4, predicted peak"),
        ("Captured", 1, "slot 0 of 2", "slot 0 of an array of 2, predicted peak"),
        ("Spilled", 3, "slot 1 of 2", "spilled, slot 1 of an array of 2, 3 shards, predicted"),
        ("Captured", 1, "slot 7 of 8; from step 9 slot 1 of 2", "slot 1 of an array of 2, pred"),
        ("Captured", 1, "slot 7 of 8; from step 9 alone", "captured, 1 shard, predicted peak"),
        (
            "Resident",
            1,
            "slot 3 of 4; for good from step 5 alone",
            "resident, 1 shard, predicted peak",
        ),
        ("Spilled", 3, None, "spilled, 3 shards, predicted peak"),
    ],
)
def test_a_trial_is_told_by_its_seat_while_it_is_in_an_array(
    technique: str, shards: int, array: str | None, words: str, study_events: Events
) -> None:
    snapshot = Snapshot.of(study_events())
    numerics = {} if array is None else {"array": array}
    row = replace(snapshot.trial(0), technique=technique, shards=shards, numerics=numerics)

    lines = describe_trial(snapshot, row, Path("runs/s")).splitlines()

    assert lines[1].startswith(words)


def test_a_study_that_ended_since_it_was_read_is_not_interrupted(
    tmp_path: Path, study_events: Events
) -> None:
    *before, ended = study_events()
    with Database(tmp_path) as database:
        database.write(before)
        read = Snapshot.of(before)
        assert study_state(read, tmp_path) == "running"
        database.write([ended])
    assert study_state(read, tmp_path) == "running", "as it was when it was read"
    assert study_state(Snapshot.of([*before, ended]), tmp_path) == "finished"


def test_a_study_whose_process_died_is_interrupted(tmp_path: Path, study_events: Events) -> None:
    *before, _ = study_events()
    with Database(tmp_path) as database:
        database.write(before)
    assert study_state(Snapshot.of(before), tmp_path) == "interrupted"


def test_steps_that_were_lost_with_a_process_are_told(
    tmp_path: Path, study_events: Events
) -> None:
    steps = [event for event in study_events() if not isinstance(event, StudyFinished)]
    begun = steps[: next(at for at, e in enumerate(steps) if isinstance(e, TrialFinished))]
    path = "trials/0000/step-00000005"
    saved = CheckpointWritten(time=9.0, trial=0, step=5, path=path, bytes=9, seconds=0.1)
    with Database(tmp_path) as database:
        database.write([*begun, saved])
        assert unsaved_lines(Snapshot.of([*begun, saved]), tmp_path) == []
    (line,) = unsaved_lines(Snapshot.of([*begun, saved]), tmp_path)
    rows = [row for row in Snapshot.of(begun).trials if row.step]
    lost = sum(row.step for row in rows) - 5
    assert f"{lost} steps of {len(rows)} trial" in line
    assert f"shoal resume {tmp_path}" in line
