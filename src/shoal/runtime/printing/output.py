"""What a trial prints goes to its own log file, whichever trials share the worker.

[Note: whose line it is]
The device loop says whose code its thread runs. A thread that was started belongs for life
to the trial that was running where it was started: a lane's host thread to its lane's
trial, a user's thread to the user's trial. A thread that Python did not start (autograd's
on a GPU) counts as the device loop's. A forked process, such as a DataLoader's worker,
keeps what it was born with. What is printed while no trial runs, which is when a study is
described and measured, goes where it always went, each line once (``shownonce.py``).

Caught are Python's own streams, and with them warnings and the logging handlers that write
to them. What C code or a spawned process writes to descriptors 1 and 2 is not.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.runtime.printing.shownonce import ShownOnce
from shoal.runtime.printing.triallog import Stamp, TrialLog

MAX_BYTES = 16 * 2**20
_MAX_LINE = 2**16  # characters of a line that does not end; then it is cut into several
_MAX_OPEN = 16  # files of one worker
_MAX_WARNINGS = 10_000  # that are remembered, so that each is shown once
_OWNER = "_shoal_trial"  # the attribute of a thread that says whose it is: study, trial
Starter = Callable[[threading.Thread], None]


class TrialOutput:
    """Sends what a trial prints to its log; one for the life of a worker process.

    ``install`` for a study, ``close`` at its end, and again for the next one. Nothing that
    happens to a log file is raised into the code that prints: what cannot be written is
    dropped and counted in ``dropped``, in lines.

    Attributes:
        taken: How often something was printed, whoever did it.
    """

    def __init__(
        self, *, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.time
    ) -> None:
        self._max_bytes, self._stamp = max_bytes, Stamp(clock)
        self.taken = 0
        self._current: int | None = None
        self._home = threading.get_ident()
        self._study: Path | None = None
        self._serial = 0  # of the study: threads may outlive theirs
        self._streams: dict[str, _Stream] = {}
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._start: Starter | None = None
        self._start_marked: Starter | None = None
        self._show_below: Callable[..., None] | None = None
        self._shown_warnings: set[tuple[object, ...]] = set()
        self._once = ShownOnce()
        self._forget_all()

    def install(self, study_directory: str | os.PathLike[str]) -> None:
        """Catch what trials of the study in this directory print, from now on.

        Call it in the device loop's thread, before the recipe is imported.
        """
        self._study, self._serial = Path(study_directory), self._serial + 1
        self._once = ShownOnce()
        self._home, self._current = threading.get_ident(), None
        for name in ("stdout", "stderr"):
            stream = self._streams.setdefault(name, _Stream(self))
            if getattr(sys, name) is not stream:
                stream.below = getattr(sys, name)
                setattr(sys, name, stream)
                self._redirect_handlers(stream)
        self._mark_threads()
        self._catch_warnings()

    def set(self, trial: int | None) -> None:
        """Say whose code the device loop's thread runs from here on; None for its own."""
        self._current = trial

    @property
    def dropped(self) -> int:
        """Lines that could not be written."""
        return self._dropped + sum(log.dropped for log in self._logs.values())

    def close(self) -> None:
        """Write what is left, close the files, and put the streams back."""
        with self._lock:
            for key, line in self._pending.items():
                self._log(key[0]).write([_shown(line)])
            for log in self._logs.values():
                log.close()
        dropped = self.dropped
        self._forget_all(dropped)
        self._current = self._study = None
        for name, stream in self._streams.items():
            for thread, held_by in self._once.waiting():
                if held_by == id(stream):
                    stream.write_below(self._once.held((thread, held_by)))
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.below)
        for handler, stream_before in self._handlers:
            handler.setStream(stream_before)
        self._handlers.clear()
        if warnings.showwarning == self._show_warning and self._show_below is not None:
            warnings.showwarning, self._show_below = self._show_below, None
        self._shown_warnings.clear()
        if self._start is not None and threading.Thread.start is self._start_marked:
            _set_starter(self._start)
            self._start = None

    # -- whose ----------------------------------------------------------------------------

    def whose(self) -> int | None:
        """The trial whose code the calling thread runs."""
        if threading.get_ident() == self._home:
            return self._current
        serial, trial = vars(threading.current_thread()).get(_OWNER, (self._serial, self._current))
        return trial if serial == self._serial else None

    def _mark_threads(self) -> None:
        """Have every thread that is started remember who started it."""
        if self._start is not None:
            return
        start = self._start = threading.Thread.start

        def start_marked(thread: threading.Thread) -> None:
            vars(thread)[_OWNER] = self._serial, self.whose()
            start(thread)

        self._start_marked = start_marked
        _set_starter(start_marked)

    def _catch_warnings(self) -> None:
        """Show a warning once to every trial, as if each had a process of its own.

        Python shows it once to a process, and measuring a trial may have been that once.
        """
        if self._show_below is None:
            warnings.simplefilter("always", append=True)  # behind what is to be ignored
            self._show_below = warnings.showwarning
            warnings.showwarning = self._show_warning

    def _show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        key = (self.whose(), category, str(message), filename, lineno)
        if key in self._shown_warnings:
            return
        if len(self._shown_warnings) < _MAX_WARNINGS:
            self._shown_warnings.add(key)
        assert self._show_below is not None
        self._show_below(message, category, filename, lineno, file, line)

    def _redirect_handlers(self, stream: _Stream) -> None:
        """Logging handlers that were made before keep the stream of that time."""
        for handler in _stream_handlers():
            if handler.stream is stream.below:
                self._handlers.append((handler, stream.below))
                handler.setStream(stream)

    # -- lines ----------------------------------------------------------------------------

    def take(self, stream: _Stream, text: str) -> None:
        """Take what was written to a stream: to the trial's log, or to the stream below."""
        self.taken += 1
        trial = self.whose() if self._study is not None else None
        if os.getpid() != self._pid:  # a forked child: its parent may have held the lock
            self._forget_all()
        if trial is None:
            stream.write_below(self._new_of(stream, text))
            return
        try:
            with self._lock:
                self._split((trial, threading.get_ident(), id(stream)), text)
        except Exception:
            self._dropped += 1

    def _new_of(self, stream: _Stream, text: str) -> str:
        if self._study is None:
            return text
        with self._lock:
            return self._once.passed((threading.get_ident(), id(stream)), text)

    def show_held(self, stream: _Stream) -> None:
        """Write what the calling thread has begun of a line, as whoever flushes wants."""
        with self._lock:
            held = self._once.held((threading.get_ident(), id(stream)))
        stream.write_below(held)

    def _split(self, key: tuple[int, int, int], text: str) -> None:
        """Keep a line until it is whole, so that lines of two threads never mix."""
        *lines, rest = (self._pending.pop(key, "") + text).split("\n")
        rest = _overwritten(rest)
        while len(rest) > _MAX_LINE:
            lines.append(rest[:_MAX_LINE])
            rest = rest[_MAX_LINE:]
        if rest:
            self._pending[key] = rest
        if lines:
            self._log(key[0]).write([_shown(line) for line in lines])

    def _log(self, trial: int) -> TrialLog:
        log = self._logs.get(trial)
        if log is None:
            assert self._study is not None
            log = TrialLog(self._study, trial, self._max_bytes, self._stamp)
            self._logs[trial] = log
        self._logs.move_to_end(trial)
        if len(self._logs) > _MAX_OPEN:
            _, oldest = self._logs.popitem(last=False)
            oldest.close()
            self._dropped += oldest.dropped
        return log

    def _forget_all(self, dropped: int = 0) -> None:
        self._pid, self._dropped = os.getpid(), dropped
        self._lock = threading.RLock()  # a finaliser may print while its thread prints
        self._pending: dict[tuple[int, int, int], str] = {}
        self._logs: OrderedDict[int, TrialLog] = OrderedDict()


class _Stream(io.TextIOBase):
    """Stands where ``sys.stdout`` or ``sys.stderr`` stood; ``below`` is what was there."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, output: TrialOutput) -> None:
        self._output = output
        self.below: Any = None
        self.buffer = _Bytes(self)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._output.take(self, text)
        return len(text)

    def write_below(self, text: str) -> None:
        if text and self.below is not None:
            self.below.write(text)

    def flush(self) -> None:
        self._output.show_held(self)
        if self.below is not None:
            self.below.flush()

    def fileno(self) -> int:
        return int(self.below.fileno())

    def writable(self) -> bool:
        return True

    def reconfigure(self, **options: Any) -> None:
        """Accepted, as of any standard stream; a log is always UTF-8, line by line."""

    def close(self) -> None:
        """A standard stream outlives whoever closes it."""


class _Bytes(io.BufferedIOBase):
    """``sys.stdout.buffer``, for those who write bytes."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        self._stream.write(bytes(data).decode("utf-8", "replace"))
        return len(data)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """As its stream."""


def _set_starter(starter: Starter) -> None:
    threading.Thread.start = starter  # type: ignore[method-assign, assignment]


def _overwritten(rest: str) -> str:
    """What a terminal would still show of a line that is not finished: a progress bar's last."""
    shown, returned = rest.rstrip("\r"), rest.endswith("\r")
    return shown.rpartition("\r")[2] + ("\r" if returned else "")


def _shown(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                yield handler
