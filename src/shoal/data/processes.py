"""Processes that a loader started: seen when they die, and ended for good."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess

GRACE_S = 1.0  # for processes to end after each word, the next one being harder
POLL_S = 1.0
REAP_S = 0.01


class ProcessWatch:
    """A thread that kills all of ``processes`` when one has died or a wait is overdue.

    The waiting thread sets ``since`` while it waits. ``death`` and ``is_overdue`` are set
    before anything is killed. Ends by itself when the processes have ended well.
    """

    def __init__(self, processes: Sequence[BaseProcess], timeout_s: float) -> None:
        self.processes = tuple(processes)
        self.since: float | None = None
        self.death = ""
        self.is_overdue = False
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self._noticed = threading.Event()
        if processes:
            threading.Thread(target=self._run, name="loader-watch", daemon=True).start()

    def stop(self) -> None:
        """Take no death for an accident from now on."""
        self._stopped.set()

    def find_ended(self) -> str:
        """What is known of a process that has ended, a moment after one may have; or nothing."""
        if not self._noticed.wait(GRACE_S if self.processes else 0.0):
            known = ((p, p.exitcode) for p in self.processes)
            return next((_death(p, code) for p, code in known if code is not None), "")
        return self.death

    def _run(self) -> None:
        left = list(self.processes)
        poll_s = min(POLL_S, self._timeout_s / 4)
        while left:
            ended = connection.wait([p.sentinel for p in left], timeout=poll_s)
            if self._stopped.is_set():
                return
            codes = [(p, p.exitcode) for p in left]  # read once: another may die meanwhile
            self.death = next((_death(p, code) for p, code in codes if code), "")
            since = self.since
            self.is_overdue = since is not None and time.monotonic() - since > self._timeout_s
            if self.death or self.is_overdue:
                self._noticed.set()
                _send(signal.SIGKILL, self.processes)
                return
            left = [p for p, code in codes if code is None]
            if ended and len(left) == len(self.processes):
                self._stopped.wait(REAP_S)  # ended, and not yet to be waited for


def end_processes(iterator: object, processes: Sequence[BaseProcess]) -> None:
    """End what a loader started: by torch's own way first, then with signals.

    Takes three times ``GRACE_S`` at most; afterwards no process is left.
    """
    shut_down = getattr(iterator, "_shutdown_workers", None)
    helper = threading.Thread(target=shut_down, daemon=True) if shut_down else None
    if helper:  # also when all have ended: torch keeps a record of them
        helper.start()
        _wait(processes)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if any(p.exitcode is None for p in processes):
            _send(number, processes)
            _wait(processes)
    if helper:
        helper.join(GRACE_S)


def _wait(processes: Sequence[BaseProcess]) -> None:
    """Until all have ended, or ``GRACE_S`` is over."""
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _send(number: signal.Signals, processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.exitcode is None:
            process.terminate() if number == signal.SIGTERM else process.kill()


def _death(process: BaseProcess, code: int) -> str:
    if code < 0:
        return f"process {process.pid} was killed by {signal.Signals(-code).name}"
    return f"process {process.pid} ended with exit code {code}"
