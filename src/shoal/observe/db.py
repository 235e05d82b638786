"""The study's database: the one process that runs the study writes every event into it.

[Note: what an answer means]
``write`` returns when the batch survives the death of this process. A batch that holds a
transition, of which there are few, survives a power cut too: it and all before it are on
the disk. What tells of progress alone may lose its last moments to a power cut; the steps
after the newest generation are done again anyway.

    StepFinished Evaluated TrialParked ...    in the WAL, in the system's memory
    TrialFinished CheckpointWritten ...       fsync of the WAL

[Note: one file after the end]
A database that is closed has no WAL any more (see connect.py) unless somebody is reading
it at that moment; then the WAL stays, which harms nobody, and the next writer has it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from shoal.core.errors import StorageError
from shoal.core.event import (
    ActionFinished,
    Evaluated,
    Event,
    PeakMeasured,
    StepFinished,
    TrialMoved,
    TrialParked,
    TrialResumed,
)
from shoal.core.studyfiles import DATABASE, TIMELINE
from shoal.observe.actions import ActionLog
from shoal.observe.connect import open_for_writing
from shoal.observe.encoding import (
    EVENT_COLUMNS,
    METRIC_COLUMNS,
    STEP_COLUMNS,
    Row,
    event_row,
    has_metric_rows,
    metric_rows,
    step_values,
)
from shoal.observe.lock import StudyLock
from shoal.observe.trouble import damaged, in_words
from shoal.storage.files import make_directory

_PROGRESS = (StepFinished, Evaluated, PeakMeasured, TrialParked, TrialResumed, TrialMoved)
_MOST = 1 << 62  # events of a study
_WAL_PAGES = 4000  # 16 MiB: a checkpoint waits for the disk twice
_INSERTS = {
    table: f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * (columns.count(',') + 1))})"
    for table, columns in (
        ("events", EVENT_COLUMNS),
        ("steps", STEP_COLUMNS),
        ("metrics", METRIC_COLUMNS),
    )
}
_LAST = "SELECT max(seq) FROM (" + " UNION ALL ".join(
    f"SELECT max(seq) AS seq FROM {table}" for table in _INSERTS
)


@dataclass(slots=True)
class _Batch:
    """A batch as rows of its tables; ``following`` is the next event's number."""

    following: int
    events: list[Row] = field(default_factory=list)
    steps: list[Row] = field(default_factory=list)
    metrics: list[Row] = field(default_factory=list)
    is_durable: bool = False


class Database:
    """The one writer of a study's ``study.db`` and ``timeline.jsonl``; a context manager.

    For one thread. After a failed ``write`` nothing of its batch is there, and the same
    batch can be written again.

    Args:
        directory: The study's; it is made where there is none.
        lock: The study's lock, if the caller holds it, and keeps it.

    Raises:
        SpecError: another process runs this study.
        StorageError: the files are damaged, of a newer format, or cannot be written.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, lock: StudyLock | None = None
    ) -> None:
        self.path = Path(directory) / DATABASE
        with ExitStack() as stack, in_words(self.path, "write"):
            make_directory(self.path.parent)
            if lock is None:
                stack.enter_context(StudyLock(self.path.parent))
            self._connection = stack.enter_context(closing(open_for_writing(self.path)))
            self._connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
            stack.callback(self._leave_one_file)
            self._actions = stack.enter_context(closing(ActionLog(self.path.with_name(TIMELINE))))
            self._following: int | None = self._ask_following()  # None: to be asked again
            self._is_durable: bool | None = None
            self._resources = stack.pop_all()

    def write(self, events: Iterable[Event]) -> None:
        """Add a batch, all or nothing; it survives a kill of this process once this returns.

        Raises:
            StorageError: the disk is full or failing.
        """
        batch = events if isinstance(events, Sequence) else list(events)
        with in_words(self.path, "write"):
            before = self._actions.size
            self._actions.append(e for e in batch if type(e) is ActionFinished)
            try:
                self._insert(batch)
            except BaseException:
                self._actions.cut(before)
                raise

    def close(self) -> None:
        """Let go of files and lock; a second call does nothing."""
        self._resources.close()

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _insert(self, events: Sequence[Event]) -> None:
        try:
            self._commit(self._sorted(events, with_columns=True))
        except (OverflowError, UnicodeEncodeError):  # a value fits no column, but JSON
            self._commit(self._sorted(events, with_columns=False))

    def _sorted(self, events: Sequence[Event], *, with_columns: bool) -> _Batch:
        """The rows of a batch; ``with_columns`` where an event has a table of its own."""
        batch = _Batch(self._following or self._ask_following())
        seq = batch.following
        for event in events:
            kind = type(event)
            if kind is ActionFinished:
                continue
            if kind is StepFinished and with_columns:
                batch.steps.append((seq, *step_values(event)))
            elif isinstance(event, Evaluated) and with_columns and has_metric_rows(event):
                batch.metrics += metric_rows(seq, event)
            else:
                batch.events.append(event_row(seq, event))
                batch.is_durable = batch.is_durable or kind not in _PROGRESS
            seq += 1
        batch.following = seq
        return batch

    def _commit(self, batch: _Batch) -> None:
        if batch.following == self._following:
            return
        self._following = None
        self._make_durable(batch.is_durable)
        with self._transaction():
            for table in _INSERTS:
                rows = getattr(batch, table)
                if rows:
                    self._connection.executemany(_INSERTS[table], rows)
        self._following = batch.following

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite has often rolled back by itself
                self._connection.execute("ROLLBACK")
            raise

    def _make_durable(self, wanted: bool) -> None:
        """Whether the next commit waits until it is on the disk."""
        if wanted != self._is_durable:
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if wanted else 'NORMAL'}")
            self._is_durable = wanted

    def _ask_following(self) -> int:
        (last,) = self._connection.execute(_LAST + ")").fetchone()
        if not (last is None or (type(last) is int and last < _MOST)):
            raise StorageError(damaged(self.path, f"an event has the number {last!r}"))
        return (last or 0) + 1

    def _leave_one_file(self) -> None:
        """Move the WAL into the database; nothing is lost where that cannot be done."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA busy_timeout = 100")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._connection.execute("PRAGMA journal_mode = DELETE")
