"""The database: batches that are there or not, one writer, and one file at the end."""

import math
import os
import sqlite3
from contextlib import closing

import pytest

from shoal.core.errors import SpecError, StorageError
from shoal.core.event import Evaluated, StepFinished
from shoal.observe import Database, StudyLock, read_events, read_timeline
from shoal.observe.db import _PROGRESS


def write(directory, *events):
    with Database(directory) as database:
        database.write(events)


def query(directory, sql):
    with closing(sqlite3.connect(directory / "study.db")) as connection:
        return connection.execute(sql).fetchall()


def test_what_is_written_is_read_back_in_order(tmp_path, tell):
    place = tmp_path / "runs" / "digits"
    events = [tell.study(), tell.planned(0), tell.step(0, 1), tell.evaluated(0, 1, a=1.0, b=2.0)]
    events += [tell.started(0), tell.step(0, 2)]
    write(place, *events[:2])
    write(place, *events[2:])

    assert list(read_events(place)) == events
    assert list(read_events(place / "study.db")) == events


def test_the_order_is_that_of_writing_whatever_the_clock_says(tmp_path, tell):
    tell.time = 5000.0
    late = [tell.step(0, 1), tell.evaluated(0, 1, loss=1.0), tell.started(1)]
    tell.time = 1000.0
    early = [tell.started(2), tell.step(2, 1), tell.evaluated(2, 1, loss=2.0)]

    write(tmp_path, *late, *early)

    assert list(read_events(tmp_path)) == late + early


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 2.0])
def test_every_float_comes_back_from_its_column(tmp_path, tell, value):
    step = tell.step(0, 1, loss=value)
    write(tmp_path, step, tell.evaluated(0, 1, valid_loss=value))

    first, second = read_events(tmp_path)

    assert repr(first.loss) == repr(value)
    assert repr(second.metrics) == repr({"valid_loss": value})
    assert query(tmp_path, "SELECT count(*) FROM events") == [(0,)]


@pytest.mark.parametrize(
    "event",
    [
        StepFinished(time=1.0, trial=2**70, step=1, epoch=0, loss=1.0, seconds=1.0, device="d"),
        StepFinished(time=1.0, trial=0, step=1, epoch=0, loss=1.0, seconds=1.0, device="\ud800"),
        Evaluated(time=1.0, trial=0, step=1, epoch=0, metrics={}),
        Evaluated(time=1.0, trial=0, step=1, epoch=0, metrics={"count": 3}),
        Evaluated(time=1.0, trial=0, step=1, epoch=0, metrics={"\ud800": 3.0}),
    ],
)
def test_what_fits_no_column_is_kept_as_json(tmp_path, tell, event):
    write(tmp_path, tell.step(0, 1), event, tell.step(0, 2))

    assert repr(list(read_events(tmp_path))[1]) == repr(event)


def test_a_written_batch_can_be_read_before_the_database_is_closed(tmp_path, tell):
    with Database(tmp_path) as database:
        database.write([tell.step(0, 1), tell.started(0)])

        assert len(list(read_events(tmp_path))) == 2


def test_an_empty_batch_is_nothing(tmp_path):
    with Database(tmp_path) as database:
        database.write([])
        database.write(iter(()))

    assert list(read_events(tmp_path)) == []


# ---------------------------------------------------------------- one writer, one file


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path, tell):
    with Database(tmp_path), pytest.raises(SpecError, match=r"has another writer.*process \d+"):
        Database(tmp_path)

    write(tmp_path, tell.started(0))


def test_a_lock_that_is_held_already_is_used_and_kept(tmp_path, tell):
    with StudyLock(tmp_path) as lock:
        with Database(tmp_path, lock=lock) as database:
            database.write([tell.started(0)])

        with pytest.raises(SpecError, match="has another writer"):
            Database(tmp_path)


def test_a_closed_database_is_one_file(tmp_path, tell):
    with Database(tmp_path) as database:
        database.write([tell.started(0)])
        assert (tmp_path / "study.db-wal").exists()
    list(read_events(tmp_path))

    assert sorted(os.listdir(tmp_path)) == ["lock", "study.db", "timeline.jsonl"]


@pytest.mark.parametrize("content", [None, b""])
def test_a_database_that_nobody_wrote_to_is_one_file_too(tmp_path, content):
    if content is not None:
        (tmp_path / "study.db").write_bytes(content)
    for _ in range(2):
        Database(tmp_path).close()
        assert query(tmp_path, "PRAGMA journal_mode") == [("delete",)]
        assert sorted(os.listdir(tmp_path)) == ["lock", "study.db", "timeline.jsonl"]


def test_closing_while_somebody_reads_loses_nothing(tmp_path, tell):
    with Database(tmp_path) as database:
        database.write([tell.started(0), tell.started(1)])
        reader = read_events(tmp_path)
        next(reader)

    assert (tmp_path / "study.db-wal").exists()
    assert len([*reader]) == 1
    write(tmp_path, tell.started(2))
    assert [event.trial for event in read_events(tmp_path)] == [0, 1, 2]


def test_nobody_else_may_read_what_a_study_writes(tmp_path, tell):
    with Database(tmp_path / "study") as database:
        database.write([tell.started(0), tell.action(0, 1)])
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "study").iterdir()}

    assert set(modes.values()) == {0o600}
    assert len(modes) == 5
    assert (tmp_path / "study").stat().st_mode & 0o777 == 0o700


def test_a_link_in_the_place_of_the_timeline_is_not_followed(tmp_path, tell):
    victim = tmp_path / "thesis.tex"
    victim.write_text("no newline at its end")
    (tmp_path / "timeline.jsonl").symlink_to(victim)

    with pytest.raises(StorageError, match=r"cannot write .*timeline\.jsonl"):
        Database(tmp_path)
    assert victim.read_text() == "no newline at its end"


def test_closing_twice_does_nothing(tmp_path):
    database = Database(tmp_path)
    database.close()
    database.close()


# ---------------------------------------------------------------- what an answer means


def test_a_transition_is_on_the_disk_and_progress_need_not_be(tmp_path, tell):
    modes = []
    with Database(tmp_path) as database:
        for batch in ([tell.step(0, 1)], [tell.step(0, 2), tell.started(0)], [tell.step(0, 3)]):
            database.write(batch)
            modes += database._connection.execute("PRAGMA synchronous").fetchone()

    assert modes == [1, 2, 1]  # NORMAL, FULL, NORMAL
    assert StepFinished in _PROGRESS


# ---------------------------------------------------------------- a full and a failing disk


@pytest.fixture
def limited(tmp_path, tell):
    """A database that has no more room than it takes."""
    with Database(tmp_path) as database:
        database.write([tell.started(0)])
        (pages,) = database._connection.execute("PRAGMA page_count").fetchone()
        database._connection.execute(f"PRAGMA max_page_count = {pages}")
        yield database


def test_on_a_full_disk_nothing_of_the_batch_is_there_and_it_can_be_written_again(
    limited, tmp_path, tell
):
    batch = [tell.action(0, 1), *(tell.step(0, n) for n in range(1, 500)), tell.started(1)]

    for _ in range(2):
        with pytest.raises(StorageError, match=r"cannot write .*study\.db: database or disk is"):
            limited.write(batch)
        assert [event.trial for event in read_events(tmp_path)] == [0]
        assert list(read_timeline(tmp_path)) == []

    limited._connection.execute("PRAGMA max_page_count = 1000000")
    limited.write(batch)
    assert list(read_events(tmp_path))[1:] == batch[1:]
    assert list(read_timeline(tmp_path)) == batch[:1]


def test_a_full_disk_says_where_how_much_is_free_and_what_stays(limited, tell):
    with pytest.raises(StorageError) as raised:
        limited.write([tell.step(0, n) for n in range(1, 500)])

    said = str(raised.value)
    assert "study.db" in said
    assert "iB are free there" in said
    assert "Nothing of this batch was written; all before it is intact. Make room" in said


def test_a_timeline_that_has_no_room_takes_the_batch_back(tmp_path, tell, monkeypatch):
    with Database(tmp_path) as database:
        database.write([tell.started(0)])
        with open("/dev/full", "ab", buffering=0) as full:
            file = database._actions._file
            monkeypatch.setattr(database._actions, "_file", Full(file, full))
            with pytest.raises(StorageError, match=r"No space left.*Make room"):
                database.write([tell.started(1), tell.action(0, 1)])
        monkeypatch.setattr(database._actions, "_file", file)
        assert [event.trial for event in read_events(tmp_path)] == [0]

        database.write([tell.started(1), tell.action(0, 1)])

    assert [event.trial for event in read_events(tmp_path)] == [0, 1]
    assert len(list(read_timeline(tmp_path))) == 1


class Full:
    """A file that takes ten bytes and then has no room."""

    def __init__(self, file, full):
        self.file, self.full, self.room = file, full, 10

    def write(self, data):
        if not self.room:
            return self.full.write(data)
        written = self.file.write(data[: self.room])
        self.room = 0
        return written

    def truncate(self, size):
        self.file.truncate(size)


def test_an_interrupt_in_a_batch_leaves_the_database_usable(tmp_path, tell):
    def events():
        yield tell.step(0, 1)
        raise KeyboardInterrupt

    with Database(tmp_path) as database:
        with pytest.raises(KeyboardInterrupt):
            database.write(events())
        database.write([tell.step(0, 1)])

    assert len(list(read_events(tmp_path))) == 1


def test_a_commit_of_unknown_fate_does_not_give_a_number_twice(tmp_path, tell, monkeypatch):
    with Database(tmp_path) as database:
        database.write([tell.step(0, 1)])
        monkeypatch.setattr(database, "_following", None)  # interrupted after its commit
        database.write([tell.step(0, 2)])

    assert [event.step for event in read_events(tmp_path)] == [1, 2]
