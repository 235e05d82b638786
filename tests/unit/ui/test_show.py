"""One trial, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.core.errors import SpecError
from shoal.core.event import (
    CheckpointWritten,
    Evaluated,
    Event,
    StepFinished,
    StudyFinished,
    StudyStarted,
    TrialFinished,
    TrialPlanned,
    TrialPruned,
    WorkerDied,
)
from shoal.core.whys import unfused_counts
from shoal.observe import Database
from shoal.observe.rows import TrialRow
from shoal.observe.snapshot import Snapshot
from shoal.ui.show import (
    describe_trial,
    device_table,
    leaderboard,
    ls_table,
    show_study,
    study_state,
    unsaved_lines,
)

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


def _named(events: Iterable[Event], long: str) -> list[Event]:
    """The same events, the learning rate called ``long``."""
    return [
        replace(e, hp={long if n == "lr" else n: v for n, v in e.hp.items()})
        if isinstance(e, TrialPlanned)
        else e
        for e in events
    ]


def test_a_narrow_leaderboard_has_short_titles_before_it_lacks_columns(
    study_events: Events,
) -> None:
    long = "learning_rate_of_the_optimizer_of_the_head"
    snapshot = Snapshot.of(_named(study_events(2), long))
    assert long in leaderboard(snapshot)
    narrow = leaderboard(snapshot, width=80)
    assert "learning_rate..." in narrow
    assert max(map(len, narrow.splitlines())) <= 80
    assert "no room" not in narrow


def test_a_narrow_table_of_evaluations_keeps_the_step_and_the_metric_of_the_study(
    tmp_path: Path, study_events: Events
) -> None:
    found = {"valid_a_metric_with_a_long_name": 0.25, "train_loss": 0.75, "valid_loss": 0.5}
    evaluated = Evaluated(time=8.0, trial=0, step=20, epoch=2, metrics=found)
    snapshot, row = _snapshot_and_row([*study_events(2), evaluated], 0)

    def table(width: int | None) -> list[str]:
        text = describe_trial(snapshot, row, tmp_path, width=width)
        lines = text.splitlines()
        return lines[next(at for at, line in enumerate(lines) if line.startswith("step  ")) :]

    assert set(table(None)[0].split()) == {"step", "epoch", "after", *found}
    assert table(24)[0].split() == ["step", "epoch", "valid_loss"]
    assert max(map(len, table(24)[:-1])) <= 24
    assert table(24)[-1].startswith("(no room for after, ")


def test_a_narrow_table_of_devices_lacks_what_says_least(study_events: Events) -> None:
    snapshot = Snapshot.of(study_events(2))
    whole = device_table(snapshot).splitlines()[0]
    assert device_table(snapshot, width=80).splitlines()[0] == whole
    narrow = device_table(snapshot, width=50).splitlines()
    assert narrow[0].split() == ["device", "peak", "budget", "busy", "restarts"]
    assert max(map(len, narrow)) <= 50


def test_a_trial_that_waits_is_not_said_to_have_had_no_device(
    tmp_path: Path, study_events: Events
) -> None:
    events = list(study_events(2))
    text = describe_trial(*_snapshot_and_row(events, 0), tmp_path)
    assert "last on cpu:0; " in text
    waits = [*(e for e in events if not isinstance(e, TrialFinished))]
    waits = waits[: 1 + max(i for i, e in enumerate(waits) if isinstance(e, StepFinished))]
    why = "others did better"
    pruned = TrialPruned(
        time=9e9, trial=0, step=20, reason=why, checkpoint="", metrics={}, seconds=1.0
    )
    died = WorkerDied(time=8e9, device="cpu:0", pid=7, reason="killed", trials=(0,))
    snapshot, row = _snapshot_and_row([*waits, died, pruned], 0)
    assert (row.step, row.device) == (20, "")
    assert "device" not in describe_trial(snapshot, row, tmp_path).splitlines()[1]
    planned = [e for e in events if isinstance(e, StudyStarted | TrialPlanned)]
    assert "on no device yet; " in describe_trial(*_snapshot_and_row(planned, 0), tmp_path)


def _snapshot_and_row(events: Iterable[Event], trial: int) -> tuple[Snapshot, TrialRow]:
    snapshot = Snapshot.of(events)
    return snapshot, snapshot.trial(trial)


def test_a_best_evaluation_that_was_not_kept_is_told_so(
    tmp_path: Path, study_events: Events
) -> None:
    worse = Evaluated(time=9e9, trial=0, step=21, epoch=9, metrics={"valid_loss": 99.0})
    snapshot, row = _snapshot_and_row([*study_events(1), worse], 0)
    told = next(s for s in describe_trial(snapshot, row, tmp_path).splitlines() if "best: " in s)
    assert told.endswith("; not kept: Study(keep_best=True) would")


def test_reasons_that_have_no_room_are_counted_in_words() -> None:
    whys = [f"unfused: reason {number}" for number in range(4)]
    assert unfused_counts(whys)[-1] == "... and 1 more reason"
    assert unfused_counts([*whys, "unfused: another"])[-1] == "... and 2 more reasons"


def test_a_narrow_list_of_studies_keeps_their_names_states_and_results(
    tmp_path: Path, study_events: Events
) -> None:
    found = {tmp_path: Snapshot.of(study_events(2))}
    (tmp_path / "study.db").touch()
    whole = ls_table(found).splitlines()[0].split()
    assert whole[-1] == "written"
    assert ls_table(found, width=200).splitlines()[0].split() == whole
    narrow = ls_table(found, width=len(tmp_path.name) + 42).splitlines()
    assert narrow[0].split() == ["study", "state", "trials", "failed", "best"]
    assert max(map(len, narrow)) <= len(tmp_path.name) + 42


def test_of_a_study_that_is_being_planned_a_list_claims_nothing(tmp_path: Path) -> None:
    (tmp_path / "study.db").touch()
    line = ls_table({tmp_path: Snapshot.of([])}).splitlines()[1]
    assert "0/" not in line
    assert "0 ms" not in line


def test_a_trial_that_is_not_there_is_told_how_many_there_are_with_those_added(
    tmp_path: Path, study_events: Events
) -> None:
    more = {"technique": "Resident", "shards": 1, "steps": 4, "peak_bytes": 1, "numerics": {}}
    clone = TrialPlanned(time=9.0, trial=4, hp={"lr": 1.0}, seed=4, **more)
    with Database(tmp_path / "sweep") as database:
        database.write([*study_events(4), clone])

    with pytest.raises(SpecError, match="has no trial 9; it has 5, numbered from 0"):
        show_study("sweep", 9, tmp_path, as_json=False)
