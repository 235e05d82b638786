"""Readers: what they see while a study runs, after it died, and of rows that are none."""

import hashlib
import math
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from shoal.core.errors import StorageError
from shoal.core.event import TrialFinished, TrialRestarted
from shoal.observe import (
    Database,
    DatabaseReader,
    Snapshot,
    connect,
    read_events,
    read_outline,
    read_trial,
    reader,
)


def write(directory, *events):
    with Database(directory) as database:
        database.write(events)


def test_what_is_written_while_a_reader_looks_is_read_in_order(tmp_path, tell, monkeypatch):
    """A later number of one table is not seen before an earlier one of another."""
    with Database(tmp_path) as database:
        database.write([tell.study()])
        follower, fetch, late = DatabaseReader(tmp_path), reader._Rows._fetch, []
        list(follower.poll())

        def fetch_slowly(rows, query, *values):
            found = fetch(rows, query, *values)
            if "min(seq)" in query and not late:
                late.extend([tell.planned(0), tell.step(1, 1)])
                database.write(late)
            return found

        monkeypatch.setattr(reader._Rows, "_fetch", fetch_slowly)
        seen = [type(event).__name__ for _ in range(2) for event in follower.poll()]
    assert seen == ["TrialPlanned", "StepFinished"]


def change(place, *statements):
    with closing(sqlite3.connect(place / "study.db", isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def contents(place):
    """What every file of a directory holds, but for the WAL's index."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in place.iterdir()
        if path.is_file() and path.suffix != ".db-shm"
    }


# ---------------------------------------------------------------- while it runs


def test_a_reader_that_follows_gets_each_event_once(tmp_path, tell):
    follower = DatabaseReader(tmp_path)
    assert list(follower.poll()) == []

    with Database(tmp_path) as database:
        for trial in range(3):
            batch = [tell.started(trial), tell.step(trial, 1), tell.evaluated(trial, 1, a=1.0)]
            database.write(batch)
            assert list(follower.poll()) == batch
            assert list(follower.poll()) == []
    write(tmp_path, tell.started(9))
    assert [event.trial for event in follower.poll()] == [9]


def test_a_poll_that_was_broken_off_goes_on_where_it_was(tmp_path, tell):
    write(tmp_path, *(tell.step(0, n) for n in range(1, 6)))
    follower = DatabaseReader(tmp_path)

    for event in follower.poll():
        if event.step == 2:
            break

    assert [event.step for event in follower.poll()] == [3, 4, 5]


def test_an_evaluation_is_never_cut_by_a_window(tmp_path, tell, monkeypatch):
    events = [tell.evaluated(0, n, a=1.0, b=2.0, c=3.0) for n in range(1, 9)]
    events += [tell.step(0, n) for n in range(1, 9)]
    write(tmp_path, *events)

    for window in (0, 1, 2, 5, 7, 100):
        monkeypatch.setattr(reader, "_WINDOW", window)
        assert list(read_events(tmp_path)) == events


def test_a_reader_that_thinks_holds_nothing_up(tmp_path, tell):
    with Database(tmp_path) as database:
        database.write([tell.step(0, n) for n in range(1, 10)])
        slow = read_events(tmp_path)
        next(slow)
        busy, *_ = database._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

        assert busy == 0
        assert len(list(slow)) == 8


# ---------------------------------------------------------------- after it died

DIE = """
import os, signal, sys
from shoal.core.event import TrialStarted
from shoal.observe import Database
database = Database(sys.argv[1])
for trial in range(50):
    database.write([TrialStarted(time=1.0, trial=trial, device="cpu:0")])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def died(tmp_path):
    """A study whose process was killed: all it wrote is in the WAL."""
    place = tmp_path / "runs"
    done = subprocess.run([sys.executable, "-c", DIE, str(place)], check=False)
    assert done.returncode == -9
    assert (place / "study.db-wal").stat().st_size > 50_000
    return place


def test_a_reader_of_a_dead_study_changes_nothing(died):
    before = contents(died)

    for _ in range(2):
        assert len(list(read_events(died))) == 50
        assert contents(died) == before


def test_a_dead_study_is_read_without_the_index_of_its_wal(died):
    before = contents(died)
    (died / "study.db-shm").unlink()

    assert len(list(read_events(died))) == 50
    assert contents(died) == before


def test_a_dead_study_is_read_where_nothing_can_be_written(died, monkeypatch):
    before, usual = contents(died), connect._connect
    (died / "study.db-shm").unlink()
    monkeypatch.setattr(connect, "_connect", refusing(usual, died))

    assert len(list(read_events(died))) == 50
    assert contents(died) == before
    assert not (died / "study.db-shm").exists()


def test_a_closed_study_is_read_where_not_even_a_lock_can_be_had(tmp_path, tell, monkeypatch):
    write(tmp_path, tell.started(0))
    monkeypatch.setattr(connect, "_connect", refusing(connect._connect, tmp_path))

    assert len(list(read_events(tmp_path))) == 1
    assert sorted(os.listdir(tmp_path)) == ["lock", "study.db", "timeline.jsonl"]


def test_a_study_that_runs_is_not_read_behind_its_writers_back(tmp_path, tell, monkeypatch):
    with Database(tmp_path) as database:
        database.write([tell.started(0)])
        monkeypatch.setattr(connect, "_connect", refusing(connect._connect, tmp_path))

        with pytest.raises(StorageError, match="Let this user read and write in that directory"):
            list(read_events(tmp_path))


def refusing(usual, place):
    """``_connect`` in a directory where SQLite can make no file beside the database."""

    def connect_(path, how):
        if how == "mode=ro" and path.parent == place:
            error = sqlite3.OperationalError("unable to open database file")
            error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
            error.sqlite_errorname = "SQLITE_CANTOPEN"
            raise error
        return usual(path, how)

    return connect_


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_reads_a_directory_that_is_not_theirs(died, tmp_path):
    for path in (tmp_path, *tmp_path.parents, *tmp_path.rglob("*")):
        if path != path.parent:
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    (died / "study.db-shm").unlink()
    program = (
        "import os, sys; sys.path[:0] = sys.argv[2:]\n"
        "from shoal.observe import read_events\n"
        "list(read_events('/none')); os.setuid(65534)\n"
        "print(len(list(read_events(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", program, str(died), *sys.path]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.stdout, done.returncode) == ("50\n", 0), done.stderr


# ---------------------------------------------------------------- rows that are no events


def test_rows_that_are_no_events_are_skipped_with_one_warning(tmp_path, tell):
    write(tmp_path, tell.step(0, 1), tell.started(0), tell.evaluated(0, 1, a=1.0))
    change(
        tmp_path,
        "INSERT INTO events VALUES (10, 1.0, 'TrialStarted', 0, '{\"time\": 1.0, \"trial\": 0}')",
        "INSERT INTO events VALUES (11, 1.0, 'TrialStarted', 0, '{\"colour\": 1}')",
        "INSERT INTO events VALUES (12, 1.0, 'TrialStarted', 0, 'x')",
        "INSERT INTO events VALUES (13, 1.0, x'ff', 0, '[]')",
        "INSERT INTO events VALUES (14, 1.0, 7, 0, 8.5)",
        "INSERT INTO steps VALUES (15, 'noon', 0, 1, 0, 1.0, 1.0, 'cpu:0', NULL)",
        "INSERT INTO steps VALUES (16, 1.0, 0, 1, 0, 1.0, 1.0, x'ff', NULL)",
        "INSERT INTO steps VALUES (17, 1.0, 'a', 1, 0, 1.0, 1.0, 'cpu:0', NULL)",
        "INSERT INTO metrics VALUES (18, 0, 1.0, 0, 1, 0, 'a', 'much')",
    )
    write(tmp_path, tell.started(1))
    change(tmp_path, "INSERT INTO metrics VALUES ('z', 0, 1.0, 0, 1, 0, 'a', 1.0)")

    with pytest.warns(UserWarning, match=r"study\.db: 9 rows are no events .* them: events 10:"):
        events = list(read_events(tmp_path))

    assert [type(event).__name__ for event in events] == [
        *("StepFinished", "TrialStarted", "Evaluated", "TrialStarted")
    ]


@pytest.mark.parametrize(
    "body",
    [
        '{"time": "noon", "trial": 0, "device": "cpu:0"}',
        '{"time": 1.0, "trial": true, "device": "cpu:0"}',
        '{"time": 1.0, "trial": 0.5, "device": "cpu:0"}',
        '{"time": 1.0, "trial": 0, "device": null}',
        '{"time": 1.0, "trial": 0, "trial": 1, "device": "cpu:0"}',
        '{"event": "StudyPaused", "time": 1.0, "trial": 0, "device": "cpu:0"}',
        "[" * 50_000,
    ],
)
def test_a_body_of_other_types_is_no_event(tmp_path, tell, body):
    write(tmp_path, tell.study())
    change(tmp_path, f"INSERT INTO events VALUES (5, 1.0, 'TrialStarted', 0, '{body}')")

    with pytest.warns(UserWarning, match="rows are no events"):
        assert len(list(read_events(tmp_path))) == 1


def test_an_event_of_a_later_version_is_passed_over(tmp_path, tell):
    write(tmp_path, tell.started(0))
    change(tmp_path, "INSERT INTO events VALUES (5, 1.0, 'TrialDreamt', 0, '{\"time\": 1.0}')")

    assert len(list(read_events(tmp_path))) == 1


def test_numbers_far_apart_are_no_long_wait(tmp_path, tell):
    write(tmp_path, tell.started(0))
    change(
        tmp_path,
        *(
            f"INSERT INTO steps VALUES ({seq}, 1.0, 0, 1, 0, 1.0, 1.0, 'cpu:0', NULL)"
            for seq in (-5, 2**40, 2**63 - 1)
        ),
    )

    assert len(list(read_events(tmp_path))) == 3
    with pytest.raises(StorageError, match="is damaged: an event has the number 922"):
        Database(tmp_path)


# ---------------------------------------------------------------- without reading everything


@pytest.fixture
def long_study(tmp_path, tell):
    """Two trials, one of which was killed in the middle; a night passes between the runs."""
    events = [tell.study(), tell.planned(0), tell.planned(1), tell.started(0), tell.started(1)]
    for step in range(1, 21):
        events += [tell.step(0, step, loss=9.0 - step), tell.step(1, step, loss=1.0)]
        if step % 5 == 0:
            events.append(tell.evaluated(0, step, valid_loss=1 / step))
    tell.time += 40_000
    events += [tell.study(), TrialRestarted(time=tell.time, trial=1, step=10)]
    events += [tell.step(1, step, loss=1.0) for step in range(11, 21)]
    events += [
        TrialFinished(
            time=tell.time, trial=0, step=20, metrics={"valid_loss": 0.05}, checkpoint="c",
            seconds=40.0,
        ),
        tell.evaluated(1, 20, valid_loss=math.nan),
    ]  # fmt: skip
    write(tmp_path, *events)
    return tmp_path


def test_the_outline_has_the_results_and_the_times_and_few_steps(long_study):
    events = list(read_outline(long_study))
    whole, outline = Snapshot.of(read_events(long_study)), Snapshot.of(events)

    assert len(events) == 12
    assert (outline.seconds, outline.runs, outline.total) == (whole.seconds, 2, 2)
    assert outline.trial(0).metrics["valid_loss"] == 0.05
    assert outline.trial(0).state == whole.trial(0).state


@pytest.mark.parametrize("trial", [0, 1])
def test_a_trial_is_read_alone(long_study, trial):
    whole, alone = Snapshot.of(read_events(long_study)), Snapshot.of(read_trial(long_study, trial))

    assert repr(alone.trial(trial)) == repr(whole.trial(trial))
    for none in (7, 2**70):
        assert Snapshot.of(read_trial(long_study, none)).trial(none).history == ()


def test_a_study_that_is_replaced_is_read_anew(tmp_path, tell):
    write(tmp_path / "a", tell.started(0))
    follower = DatabaseReader(tmp_path / "a")
    list(follower.poll())
    shutil.rmtree(tmp_path / "a")

    assert list(follower.poll()) == []
