"""Formats: what is read, what is brought to today's, and what is refused."""

import random
import shutil
import sqlite3
import warnings
from contextlib import ExitStack, closing

import pytest

from shoal.core.errors import StorageError
from shoal.observe import Database, connect, read_events, schema


@pytest.fixture
def place(tmp_path, tell):
    """A study with two events."""
    with Database(tmp_path) as database:
        database.write([tell.study(), tell.step(0, 1)])
    return tmp_path


def change(place, *statements):
    """What somebody else does to a database."""
    with closing(sqlite3.connect(place / "study.db", isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def refused(place, match):
    """Both the reader and the writer refuse it, and leave every byte."""
    before = (place / "study.db").read_bytes()
    with pytest.raises(StorageError, match=match):
        list(read_events(place))
    with pytest.raises(StorageError, match=match):
        Database(place)
    assert (place / "study.db").read_bytes() == before


# ---------------------------------------------------------------- formats


def test_a_newer_format_is_refused_with_its_number(place):
    change(place, "PRAGMA user_version = 7", "CREATE TABLE dreams (night)")

    refused(
        place, r"is of format 7, and this .* up to 1\. Nothing was changed\. Open .* newer shoal"
    )


def _add_weather(connection):
    connection.execute("ALTER TABLE steps ADD COLUMN weather TEXT")
    connection.execute("UPDATE steps SET device = 'cpu:9'")


def test_an_older_format_is_migrated_by_the_writer_and_read_by_readers(place, tell, monkeypatch):
    before = (place / "study.db").read_bytes()
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, _add_weather])

    assert [event.device for event in list(read_events(place))[1:]] == ["cpu:9"]
    assert (place / "study.db").read_bytes() == before

    with Database(place) as database:
        database.write([tell.step(0, 2)])
        connection = database._connection
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
        assert connection.execute("SELECT step, weather FROM steps").fetchall() == [
            (1, None),
            (2, None),
        ]
    assert [event.device for event in list(read_events(place))[1:]] == ["cpu:9", "cpu:0"]


def test_a_migration_that_fails_changes_nothing(place, monkeypatch):
    def fail(connection):
        _add_weather(connection)
        raise sqlite3.OperationalError("no")

    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, fail])
        with pytest.raises(StorageError, match="cannot write"):
            Database(place)

    assert len(list(read_events(place))) == 2
    Database(place).close()


def test_a_database_that_is_made_while_it_is_opened_is_of_one_moment(tmp_path, monkeypatch):
    look = schema._shape

    def look_late(connection):
        monkeypatch.undo()
        writer.enter_context(Database(tmp_path))  # the owner and the format were read before this
        return look(connection)

    path = tmp_path / "study.db"
    change(tmp_path, "PRAGMA journal_mode = WAL")
    with ExitStack() as writer, closing(connect._read_only(path, "mode=ro")) as reader:
        monkeypatch.setattr(schema, "_shape", look_late)
        assert schema.check_format(reader, path) == 0
        assert schema.check_format(reader, path) == schema.newest_format()


def test_a_study_of_a_development_version_is_told_apart(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"event": "StudyStarted"}\n')

    for use in (Database, lambda place: list(read_events(place))):
        with pytest.raises(StorageError, match="earlier development version of shoal"):
            use(tmp_path)
    assert not (tmp_path / "study.db").exists()


def test_an_empty_file_is_a_study_that_begins(tmp_path, tell):
    (tmp_path / "study.db").touch()

    assert list(read_events(tmp_path)) == []
    with Database(tmp_path) as database:
        database.write([tell.started(0)])
    assert len(list(read_events(tmp_path))) == 1


def test_a_reader_meets_a_study_that_begins_while_it_looks(tmp_path, tell, monkeypatch):
    (tmp_path / "study.db").touch()
    event, copy = tell.study(), connect._in_memory

    def late_copy(connection):
        with Database(tmp_path) as database:
            database.write([event])
        return copy(connection)

    monkeypatch.setattr(connect, "_in_memory", late_copy)

    assert list(read_events(tmp_path)) == [event]


# ---------------------------------------------------------------- what others made


def test_another_programs_database_is_refused(tmp_path):
    change(tmp_path, "CREATE TABLE passwords (word)")

    refused(tmp_path, "is the database of another program: its application id is 0x0")


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("CREATE TRIGGER t AFTER INSERT ON steps BEGIN DELETE FROM steps; END", "trigger 't'"),
        ("CREATE VIEW v AS SELECT 1", "view 'v'"),
        ("CREATE TABLE more (a)", "table 'more'"),
        ("CREATE INDEX i ON steps (trial)", "index 'i'"),
        ("ALTER TABLE steps ADD COLUMN g GENERATED ALWAYS AS (trial + 1)", "table 'steps'"),
        ("DROP TABLE metrics", "missing or changed: table 'metrics'"),
    ],
)
def test_a_table_trigger_view_or_column_more_or_less_is_refused(place, statement, named):
    change(place, statement)

    refused(place, named)


def test_a_view_in_the_place_of_a_table_is_not_run(place):
    change(
        place,
        "DROP TABLE steps",
        "CREATE VIEW steps AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
        "SELECT i AS seq FROM n",
    )

    refused(place, "view 'steps'")


@pytest.mark.parametrize("content", [b"not a database at all" * 300, b"SQLite format 3\0" * 300])
def test_a_file_that_is_no_database_is_refused(tmp_path, content):
    (tmp_path / "study.db").write_bytes(content)

    refused(tmp_path, r"study\.db is damaged: .* The checkpoints under trials/ .* \.recover")


def test_a_broken_page_is_found_before_anything_is_written(tmp_path, tell):
    with Database(tmp_path) as database:
        database.write([tell.step(0, n) for n in range(1, 2000)])
    data = bytearray((tmp_path / "study.db").read_bytes())
    data[-4096:-2048] = b"\xff" * 2048
    (tmp_path / "study.db").write_bytes(data)

    with pytest.raises(StorageError, match="is damaged"):
        Database(tmp_path)
    assert (tmp_path / "study.db").read_bytes() == data


def test_a_link_in_the_place_of_a_file_is_not_followed(place, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "study.db").symlink_to(place / "study.db")
    refused(other, "is no plain file")

    (place / "study.db-wal").symlink_to(other / "victim")
    refused(place, "study.db-wal is no plain file")


def test_bytes_changed_at_random_are_an_error_or_a_warning(place, tmp_path_factory, tell):
    random.seed(0)
    whole = (place / "study.db").read_bytes()
    target = tmp_path_factory.mktemp("changed")
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(random.choice([1, 3, 30])):
            data[random.randrange(len(data))] = random.randrange(256)
        (target / "study.db").write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                list(read_events(target))
                with Database(target) as database:
                    database.write([tell.step(0, 2)])
            except StorageError:
                pass
        shutil.rmtree(target)
        target.mkdir()
