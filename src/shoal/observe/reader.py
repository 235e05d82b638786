"""Reading a study's database, while it is written and afterwards.

[Note: windows]
A reader asks for some thousand numbers at a time and holds no transaction while its
caller thinks: a WAL with a reader in it cannot be emptied, and would only grow. Numbers
are committed in order, so once one was seen nothing smaller will come.

[Note: what is left out]
``read_outline`` and ``read_trial`` spare their callers most of the steps. They keep those
that were the last before a run ended: the study's clock stands still from there on.
"""

from __future__ import annotations

import os
import sqlite3
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from shoal.core.event import Event
from shoal.observe.connect import database_path, open_for_reading
from shoal.observe.encoding import (
    METRIC_COLUMNS,
    STEP_COLUMNS,
    Row,
    evaluation_of,
    evaluations_of,
    event_of,
    step_of,
)
from shoal.observe.trouble import in_words

_WINDOW = 10_000
_LARGEST = (1 << 63) - 1
_TABLES = ("events", "steps", "metrics")
_FIRST_AFTER = "SELECT min(seq) FROM ({})".format(
    " UNION ALL ".join(f"SELECT min(seq) AS seq FROM {name} WHERE seq > ?" for name in _TABLES)
)
_SELECT = (
    "SELECT seq, kind, body FROM events WHERE {} ORDER BY seq",
    f"SELECT {STEP_COLUMNS} FROM steps WHERE {{}} ORDER BY seq",
    f"SELECT {METRIC_COLUMNS} FROM metrics WHERE {{}} ORDER BY seq, place",
)
_LAST_OF_RUNS = (
    "seq = (SELECT max(seq) FROM {0}) OR seq IN (SELECT (SELECT max(seq) FROM {0} WHERE "
    "{0}.seq < events.seq) FROM events WHERE kind = 'StudyStarted')"
)
_LAST_STEP, _LAST_METRIC = _LAST_OF_RUNS.format("steps"), _LAST_OF_RUNS.format("metrics")

Numbered = tuple[int, Event]


class DatabaseReader:
    """Reads a database that may still grow: each ``poll`` gives what is new.

    ``place`` is a study's directory. Nothing is kept open between two calls. A study that
    is not there yet is empty. Rows that are no events are skipped with a warning.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self.path = database_path(place)
        self._seen = 0

    def poll(self) -> Iterator[Event]:
        """The events since the last call; run it to its end before the next one.

        Raises:
            StorageError: the database is damaged, of a newer format, or not a study's.
        """
        with _open(self.path) as rows:
            while (first := rows.first_after(self._seen)) is not None:
                events, last = rows.between(first, min(first + _WINDOW, _LARGEST))
                for self._seen, event in events:
                    yield event
                self._seen = last


def read_events(place: str | os.PathLike[str]) -> Iterator[Event]:
    """All events of a study's directory, in the order written.

    Raises:
        StorageError: as ``DatabaseReader.poll``.
    """
    return DatabaseReader(place).poll()


def read_outline(place: str | os.PathLike[str]) -> Iterator[Event]:
    """The events without steps and evaluations: what a study came to, however long it ran.

    Training losses are means over steps, and are not in it.
    """
    with _open(database_path(place)) as rows:
        for _, event in rows.where("1", _LAST_STEP, _LAST_METRIC)[0]:
            yield event


def read_trial(place: str | os.PathLike[str], trial: int) -> Iterator[Event]:
    """The events of one trial, and those of the study as a whole."""
    trial = max(-1, min(trial, _LARGEST))  # no trial, rather than no number for SQLite
    with _open(database_path(place)) as rows:
        found, _ = rows.where(
            "trial = ? OR trial IS NULL",
            f"trial = ? OR {_LAST_STEP}",
            f"trial = ? OR {_LAST_METRIC}",
            trial,
        )
        for _, event in found:
            yield event


@contextmanager
def _open(path: Path) -> Iterator[_Rows]:
    with closing(open_for_reading(path)) as connection:
        yield _Rows(connection, path)


class _Rows:
    """The events of an open database."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self._path = connection, path
        self._texts: dict[bytes, str] = {}
        self._skipped: list[str] = []

    def first_after(self, seq: int) -> int | None:
        """The smallest number of any event after ``seq``."""
        ((found,),) = self._fetch(_FIRST_AFTER, *[seq] * len(_TABLES))  # all at one moment
        return found if type(found) is int else None

    def between(self, first: int, last: int) -> tuple[list[Numbered], int]:
        """As ``where``, for the numbers from ``first`` to ``last``, both of them included."""
        window = "seq BETWEEN ? AND ?"
        return self.where(window, window, window, first, last)

    def where(
        self, events: str, steps: str, metrics: str, *values: int
    ) -> tuple[list[Numbered], int]:
        """The events that conditions on the three tables choose, and the largest number seen.

        The numbers of rows that cannot be read count as seen.
        """
        tables = self._fetch_all((events, steps, metrics), values)
        found = [
            *self._read("events", tables[0], lambda row: event_of(row[1], row[2])),
            *self._read("steps", tables[1], lambda row: step_of(row, self._texts)),
            *self._read("metrics", evaluations_of(tables[2]), lambda rows: evaluation_of(rows[1])),
        ]
        found.sort(key=itemgetter(0))
        self._warn()
        seen = (row[0] for table in tables for row in table if type(row[0]) is int)
        return found, max(seen, default=_LARGEST)

    def _fetch_all(
        self, conditions: tuple[str, str, str], values: tuple[int, ...]
    ) -> list[list[Row]]:
        """The rows of the three tables at one moment."""
        self._fetch("BEGIN")
        try:
            return [
                self._fetch(select.format(condition), *values[: condition.count("?")])
                for select, condition in zip(_SELECT, conditions, strict=True)
            ]
        finally:
            if self._connection.in_transaction:
                self._fetch("ROLLBACK")

    def _fetch(self, query: str, *values: int) -> list[Row]:
        with in_words(self._path, "read"):
            return self._connection.execute(query, values).fetchall()

    def _read(
        self, table: str, rows: Iterable[Any], read: Callable[[Any], Event | None]
    ) -> Iterator[Numbered]:
        """The events of rows; what is none is noted and left out."""
        for row in rows:
            try:
                event = read(row)
            except (TypeError, ValueError) as error:  # of another version, or made by hand
                self._skipped.append(f"{table} {row[0]}: {error}")
                continue
            if event is not None:
                yield row[0], event

    def _warn(self) -> None:
        if self._skipped:
            warnings.warn(
                f"{self._path}: {len(self._skipped)} rows are no events and were skipped; the "
                f"first of them: {self._skipped[0]}",
                stacklevel=4,
            )
            self._skipped.clear()
