"""One trial's log file: what it printed and was warned of, behind the time of each line."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from shoal.core.studyfiles import trial_directory
from shoal.core.units import format_bytes

LOG = "log.txt"


def log_path(study: str | os.PathLike[str], trial: int) -> Path:
    """Where a trial's log lies."""
    return trial_directory(study, trial) / LOG


class TrialLog:
    """One trial's log file: whole lines behind their time, up to ``max_bytes``. Never raises."""

    def __init__(self, study: Path, trial: int, max_bytes: int, stamp: Callable[[], str]) -> None:
        self.dropped = 0
        self._path = log_path(study, trial)
        self._max_bytes, self._stamp = max_bytes, stamp
        self._file: int | None = None
        self._is_full = self._is_torn = False
        self._reason = ""  # why lines are being dropped
        self._untold = 0

    def write(self, lines: Sequence[str]) -> None:
        """Append lines, or count them as dropped."""
        if self._is_full:
            self.dropped += len(lines)
            return
        try:
            self._append(lines)
        except OSError as error:
            self._reason = error.strerror or type(error).__name__
            self._untold += len(lines)
            self.dropped += len(lines)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _append(self, lines: Sequence[str]) -> None:
        file = self._open()
        room = self._max_bytes - os.lseek(file, 0, os.SEEK_END)
        if room <= 0:  # it was cut before
            self._is_full = True
            self.dropped += len(lines)
            return
        told = [f"lines dropped: {self._untold} ({self._reason})"] if self._untold else []
        encoded = [self._encode(line) for line in (*told, *lines)]
        kept = _fitting(encoded, room)
        self._is_full = kept < len(encoded)
        if self._is_full:
            self.dropped += len(encoded) - kept
            cut = f"cut: this log has reached {format_bytes(self._max_bytes)}; the rest is dropped"
            encoded[kept:] = [self._encode(cut)]
        self._write(file, b"".join(encoded))
        self._untold = 0

    def _write(self, file: int, data: bytes) -> None:
        """In one call, so that a line is whole whoever else writes."""
        data = b"\n" + data if self._is_torn else data
        written = os.write(file, data)
        self._is_torn = written < len(data)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open(self) -> int:
        """The file; its study's directory is never made again once it is gone."""
        if self._file is None:
            for folder in (self._path.parent.parent, self._path.parent):
                folder.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            self._file = os.open(self._path, flags, 0o666)
        return self._file

    def _encode(self, line: str) -> bytes:
        return f"{self._stamp()} {line}\n".encode("utf-8", "backslashreplace")


class Stamp:
    """The time as it stands at the beginning of a line; made once a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._second, self._text = -1, ""

    def __call__(self) -> str:
        second = int(self._clock())
        if second != self._second:
            self._text = datetime.fromtimestamp(second).astimezone().isoformat(timespec="seconds")
            self._second = second
        return self._text


def _fitting(lines: Sequence[bytes], room: int) -> int:
    """How many of the first lines fit into ``room`` bytes."""
    for count, line in enumerate(lines):
        room -= len(line)
        if room < 0:
            return count
    return len(lines)
