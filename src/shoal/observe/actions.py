r"""The timeline: every ActionFinished of a study, a row each in ``timeline.jsonl``.

Its first line is the list of column names, every other line a list of their values. A
line counts once its newline is there. A crash can leave a last line without one: readers
ignore it, and the next writer cuts it off before it appends.

    ["device", "stream", "trial", "step", "action", "start", "end", "bytes"]\n
    ["cpu:0","compute",3,1,"F s0 m0",1700000000.5,1700000000.75,0]\n
    ["cpu:0","comp                                         <- torn: never happened

It is worth a look and not worth a wait for the disk: a power cut may take its end.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

from shoal.core.event import ActionFinished
from shoal.core.studyfiles import TIMELINE
from shoal.observe import jsonl

_COLUMNS = ("device", "stream", "trial", "step", "action", "start", "end", "bytes")
_values = attrgetter(*_COLUMNS)
_TAIL_BYTES = 1 << 16


class ActionLog:
    """The one writer of a timeline; whoever makes one holds the study's lock."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file: BinaryIO = open(path, "ab+", buffering=0, opener=_open_plain)  # noqa: SIM115
        self.cut(_whole_lines(self._file))

    def append(self, actions: Iterable[ActionFinished]) -> None:
        """Add rows; after an error of the file system the file ends where it ended before."""
        lines = [_line(action) for action in actions]
        if not lines:
            return
        if self.size == 0:
            lines.insert(0, jsonl.dumps(_COLUMNS) + "\n")
        data, before = "".join(lines).encode(), self.size
        try:
            self._write(memoryview(data))
        except BaseException:
            self.cut(before)
            raise
        self.size += len(data)

    def cut(self, size: int) -> None:
        """Forget all after ``size`` bytes."""
        self._file.truncate(size)
        self.size = size

    def close(self) -> None:
        """Let go of the file; a second call does nothing."""
        self._file.close()

    def _write(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) :]


def _open_plain(path: str, flags: int) -> int:
    """A plain file that nobody else may read: no link is followed, no pipe waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def _line(action: ActionFinished) -> str:
    """An action as JSON; there are several a step, so the encoder is kept out of it."""
    device, stream, trial, step, text, start, end, size = values = _values(action)
    if type(start) is type(end) is float and math.isfinite(start) and math.isfinite(end):
        return (
            f"[{_quoted(device)},{_quoted(stream)},{trial},{step},{_quoted(text)},"
            f"{start!r},{end!r},{size}]\n"
        )
    return jsonl.dumps(values) + "\n"


@lru_cache(maxsize=1024)
def _quoted(text: str) -> str:
    return jsonl.dumps(text)


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


class TimelineReader:
    """Reads a timeline that may still grow: each ``poll`` gives what is new.

    A file that is not there yet is empty. A torn last line waits for its newline.
    A whole line that cannot be read is skipped with a warning.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._offset = 0
        self._columns: list[str] = []

    def poll(self) -> Iterator[ActionFinished]:
        """The actions since the last call; run it to its end before the next one."""
        for row in self._rows():
            if not self._columns:
                self._columns = row
                continue
            try:
                named = dict(zip(self._columns, row, strict=True))
                yield ActionFinished(**{name: named[name] for name in _COLUMNS})
            except (TypeError, ValueError, KeyError) as error:
                self._warn(str(error))

    def _rows(self) -> Iterator[Any]:
        try:
            file = open(self.path, "rb", opener=_open_plain)  # noqa: SIM115  # see the with
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


def read_timeline(path: str | os.PathLike[str]) -> Iterator[ActionFinished]:
    """All actions of ``timeline.jsonl``, or of a study's directory, in the order written."""
    file = Path(path) / TIMELINE if Path(path).is_dir() else Path(path)
    return TimelineReader(file).poll()
