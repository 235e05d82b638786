"""The tables of a study's database, and how a database of an older format gets them.

[Note: one order]
Every event has a number, ``seq``, of its own: the order in which they were written, in
all tables together. Wall clocks jump; nothing is ordered by ``time``.

    events    a kind and its fields as JSON; ``time`` and ``trial`` are there for queries
    steps     the StepFinished events, a row each
    metrics   the Evaluated events, a row for each of their metrics, in their order

[Note: floats]
SQLite has no NaN and stores NULL: in these columns NULL is NaN. They have no type, since
a column of type REAL turns -0.0 into 0.0.

[Note: no index of steps]
An index of ``steps`` or ``metrics`` by trial would double what a row costs the study, in
CPU and in bytes of the WAL: each batch has rows of many trials, and every one is another
page. One trial's steps among a million are found without it in a tenth of a second.

[Note: formats]
``PRAGMA user_version`` is the format's number: how many of the MIGRATIONS were made. The
empty file is format 0. What a format looks like is what the migrations make of nothing,
to the letter: a database with a table, trigger, view or column more is none of ours.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path

from shoal.core.errors import StorageError

APPLICATION_ID = 0x53484F41  # "SHOA"
_ABOUT = "a study of shoal: order is by seq, never by time; NULL among floats is NaN"
Shape = frozenset[tuple[str, str, str, str | None]]
_FIRST = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
    "CREATE TABLE events (seq INTEGER PRIMARY KEY, time, kind TEXT NOT NULL, trial INTEGER, "
    "body TEXT NOT NULL)",
    "CREATE TABLE steps (seq INTEGER PRIMARY KEY, time, trial INTEGER NOT NULL, "
    "step INTEGER NOT NULL, epoch INTEGER NOT NULL, loss, seconds, device TEXT NOT NULL, "
    "steps_per_epoch INTEGER)",
    "CREATE TABLE metrics (seq INTEGER NOT NULL, place INTEGER NOT NULL, time, "
    "trial INTEGER NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL, "
    "name TEXT NOT NULL, value, PRIMARY KEY (seq, place)) WITHOUT ROWID",
    "CREATE INDEX events_by_trial ON events (trial)",
)


def _make_first(connection: sqlite3.Connection) -> None:
    for statement in _FIRST:
        connection.execute(statement)
    connection.execute("INSERT INTO meta VALUES ('about', ?)", (_ABOUT,))


MIGRATIONS: list[Callable[[sqlite3.Connection], None]] = [_make_first]
"""The n-th makes format n + 1 of format n, inside a transaction."""


def newest_format() -> int:
    """The format that is written."""
    return len(MIGRATIONS)


def check_format(connection: sqlite3.Connection, path: Path) -> int:
    """The database's format; 0 for a file that is empty.

    Raises:
        StorageError: it is another program's, of a newer format, or not as shoal makes it.
    """
    owner, version, shape = _at_one_moment(connection)
    if (owner, version, shape) == (0, 0, frozenset()):
        return 0
    if owner != APPLICATION_ID or version < 1:
        raise StorageError(
            f"{path} is the database of another program: its application id is {owner:#x}, "
            f"shoal's is {APPLICATION_ID:#x}. Nothing was changed. Move that file away."
        )
    if version > newest_format():
        raise StorageError(
            f"{path} is of format {version}, and this shoal knows formats up to "
            f"{newest_format()}. Nothing was changed. Open it with the newer shoal that wrote it."
        )
    if shape != expected_shape(version):
        raise StorageError(_describe_difference(path, shape, expected_shape(version)))
    return int(version)


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Bring a database from format ``version`` to this one, wholly or not at all."""
    if version == newest_format():
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for step in MIGRATIONS[version:]:
            step(connection)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {newest_format()}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def expected_shape(version: int) -> Shape:
    """What ``sqlite_master`` holds in a database of a format."""
    return _made_by(*MIGRATIONS[:version])


@cache
def _made_by(*migrations: Callable[[sqlite3.Connection], None]) -> Shape:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for step in migrations:
            step(connection)
        return _shape(connection)


def _at_one_moment(connection: sqlite3.Connection) -> tuple[int, int, Shape]:
    """The owner, the format and the shape: a writer may be making them meanwhile."""
    connection.execute("BEGIN")
    try:
        (owner,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        return owner, version, _shape(connection)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _shape(connection: sqlite3.Connection) -> Shape:
    rows = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")
    return frozenset(rows.fetchall())


def _describe_difference(path: Path, found: Shape, expected: Shape) -> str:
    strange = sorted(f"{kind} {name!r}" for kind, name, *_ in found - expected)
    missing = sorted(f"{kind} {name!r}" for kind, name, *_ in expected - found)
    parts = ["other than shoal makes: " + ", ".join(strange)] if strange else []
    parts += ["missing or changed: " + ", ".join(missing)] if missing else []
    return (
        f"{path} does not have the tables of a study ({'; '.join(parts)[:500]}). Nothing was "
        "changed or run of it. It may come from somebody who wants it opened: read it with the "
        "sqlite3 program if you trust it. The checkpoints under trials/ are files of their own."
    )
