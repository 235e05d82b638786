r"""The log: every event of a study, appended to two files of its directory.

[Note: the files]
``events.jsonl`` has one JSON object a line, with the event's kind under ``event``.
``timeline.jsonl`` has the many ActionFinished events as rows: its first line is the list
of column names, every other line a list of their values. A line counts once its newline
is there. A crash can leave a last line without one: readers ignore it, and the next
writer cuts it off before it appends.

    {"event": "StepFinished", "time": 1700000000.5, "trial": 3, "step": 1, ...}\n
    {"event": "StepFin                                     <- torn: never happened

Bytes are handed to the operating system at the end of each ``write``, so they survive
the death of the process, and reach the disk at ``sync``.
"""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from shoal.core.errors import SpecError
from shoal.core.event import ActionFinished, Event, event_from_dict, event_to_dict
from shoal.observe import jsonl

EVENTS, TIMELINE = "events.jsonl", "timeline.jsonl"
_COLUMNS = ("device", "stream", "trial", "step", "action", "start", "end", "bytes")
_TAIL_BYTES = 1 << 16


class EventLog:
    """The one writer of a study's log; a context manager.

    Not for several threads at once. After an error of the file system (a full disk)
    both files end where they ended before, so the same batch can be written again.

    Raises:
        SpecError: another process writes this log.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._events = _AppendOnly(self.path)
        try:
            self._timeline = _AppendOnly(self.path.with_name(TIMELINE))
        except BaseException:
            self._events.close()
            raise

    def write(self, events: Iterable[Event]) -> None:
        """Append a batch; it survives a kill of this process once this returns."""
        lines, rows = [], []
        for event in events:
            if isinstance(event, ActionFinished):
                rows.append(jsonl.dumps([getattr(event, name) for name in _COLUMNS]))
            else:
                lines.append(jsonl.dumps(event_to_dict(event)))
        if rows and self._timeline.size == 0:
            rows.insert(0, jsonl.dumps(_COLUMNS))
        before = self._events.size
        self._events.append(lines)
        try:
            self._timeline.append(rows)
        except OSError:
            self._events.cut(before)
            raise

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        self._events.sync()
        self._timeline.sync()

    def close(self) -> None:
        """Let go of the files; a second call does nothing."""
        self._events.close()
        self._timeline.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _AppendOnly:
    """A file of whole lines, locked for one writer."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open(path, "ab+", buffering=0)  # noqa: SIM115  # closed by close()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise SpecError(
                f"the log {path} has another writer: is this study running already? Wait for it "
                "or stop it, or give this study another name."
            ) from None
        self.cut(_whole_lines(self._file))

    def append(self, lines: list[str]) -> None:
        data = memoryview("".join(line + "\n" for line in lines).encode())
        before = self.size
        try:
            while data:
                written = self._file.write(data)
                data = data[written:]
        except OSError:
            self.cut(before)
            raise
        self.size += sum(len(line) + 1 for line in lines)  # ASCII: a character is a byte

    def cut(self, size: int) -> None:
        self._file.truncate(size)
        self.size = size

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _whole_lines(file: BinaryIO) -> int:
    """The bytes up to the last newline, found from the end."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


class LogReader:
    """Reads a log that may still grow: each ``poll`` gives what is new.

    A file that is not there yet is empty. A torn last line waits for its newline.
    A whole line that cannot be read is skipped with a warning.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._offset = 0

    def poll(self) -> Iterator[Event]:
        """The events since the last call; run it to its end before the next one."""
        for value in self._values():
            try:
                event = event_from_dict(value)
            except (TypeError, ValueError) as error:  # another version's fields, no mapping
                self._warn(str(error))
                continue
            if event is not None:
                yield event

    def _values(self) -> Iterator[Any]:
        try:
            file = open(self.path, "rb")  # noqa: SIM115  # closed by the with below
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                try:
                    yield jsonl.loads(line.decode())
                except ValueError as error:
                    self._warn(str(error))

    def _warn(self, reason: str) -> None:
        warnings.warn(
            f"{self.path}: the line that ends at byte {self._offset} cannot be read and was "
            f"skipped: {reason}",
            stacklevel=3,
        )


class TimelineReader(LogReader):
    """The same for ``timeline.jsonl``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._columns: list[str] = []

    def poll(self) -> Iterator[ActionFinished]:
        """The actions since the last call; run it to its end before the next one."""
        for row in self._values():
            if not self._columns:
                self._columns = row
                continue
            try:
                named = dict(zip(self._columns, row, strict=True))
                yield ActionFinished(**{name: named[name] for name in _COLUMNS})
            except (TypeError, ValueError, KeyError) as error:
                self._warn(str(error))


def read_events(path: str | os.PathLike[str]) -> Iterator[Event]:
    """All events of ``events.jsonl``, or of a study's directory, in the order written."""
    return LogReader(_file(path, EVENTS)).poll()


def read_timeline(path: str | os.PathLike[str]) -> Iterator[ActionFinished]:
    """All actions of ``timeline.jsonl``, or of a study's directory, in the order written."""
    return TimelineReader(_file(path, TIMELINE)).poll()


def _file(path: str | os.PathLike[str], name: str) -> Path:
    return Path(path) / name if Path(path).is_dir() else Path(path)
