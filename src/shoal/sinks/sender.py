"""A thread that tells runs in MLflow what is new, so that no study waits for MLflow.

[Note: nothing is a queue]
What waits is kept by trial, as one change: params, tags and a state are as many as there are
trials, and stay until they are sent. Only values are many, and only they have a limit.
"""

from __future__ import annotations

import threading

from shoal.core.units import counted
from shoal.sinks.mlflowruns import Runs
from shoal.sinks.runchange import Change, Waiting

_GATHER_S = 1.0  # between two rounds: what comes meanwhile is sent together
_LONGEST_PAUSE_S = 60.0


class Sender:
    """Tells ``runs`` what is ``put``; ``room`` is how many values may wait.

    The thread begins with the first change, and holds the lock during no request. It is a daemon:
    a request that never returns keeps no process from ending.
    """

    def __init__(self, runs: Runs, *, room: int) -> None:
        self._runs, self._room = runs, room
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting: dict[int, Waiting] = {}
        self._sending: tuple[int, ...] = ()  # the trial that the thread is at, if any
        self._values = 0  # that wait, or are being sent
        self._dropped = 0
        self._is_closing = self._is_over = False
        self._error, self._is_told = "", False

    @property
    def dropped(self) -> int:
        """How many values were given up, or refused."""
        return self._dropped + self._runs.refused

    def put(self, trial: int, change: Change) -> None:
        """Leave a change to the thread; returns at once."""
        with self._news:
            taken = self._waiting.setdefault(trial, Waiting()).add(
                change, self._room - self._values
            )
            self._values += taken
            self._dropped += len(change.values) - taken
            self._start()
            self._news.notify_all()

    def trouble(self) -> str:
        """Why nothing can be sent at present, said once; else empty."""
        with self._news:
            if not self._error or self._is_told:
                return ""
            self._is_told = True
            return (
                f"MLflowSink cannot log to {self._runs.place} ({self._error}). The study goes "
                f"on; up to {counted(self._room, 'value')} wait here until MLflow takes them."
            )

    def close(self, wait_s: float) -> str:
        """Send what waits, for ``wait_s`` at most; returns in words what was not sent."""
        with self._news:
            self._is_closing = True
            if self._has_work():
                self._start()
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join(wait_s)
        with self._news:
            self._is_over = True
            behind = len({*self._waiting, *self._sending, *self._runs.lacking})
            self._waiting.clear()
            self._dropped += self._values
            self._values = 0
            self._news.notify_all()
        if not self.dropped and not behind:
            return ""
        why = self._error or self._runs.why or f"it took more than the {wait_s:g} s of wait_s"
        return (
            f"MLflowSink did not log everything to {self._runs.place} ({why}): "
            f"{counted(self.dropped, 'value')} dropped, {counted(behind, 'run')} not up to date. "
            "The study's own record is whole (shoal.open); run the study again with the sink, and "
            "its runs get their states, and the evaluations after the last that they have."
        )

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="shoal-mlflow", daemon=True)
            self._thread.start()

    def _has_work(self) -> bool:
        return bool(self._waiting) or bool(self._runs.lacking)

    def _work(self) -> None:
        pause_s = _GATHER_S
        while self._wait(pause_s):
            try:
                self._runs.open()
                while (taken := self._take()) is not None:
                    self._tell(*taken)
                self._error, pause_s = "", _GATHER_S
            except Exception as error:  # whatever MLflow raises: it is tried again
                self._runs.forget()
                self._error = f"{type(error).__name__}: {str(error)[:300]}"
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _wait(self, pause_s: float) -> bool:
        """Until there is something to do, after a pause; false: there will be nothing more."""
        with self._news:
            was_closing = self._is_closing
            if not was_closing or self._has_work():
                self._news.wait_for(
                    lambda: self._is_over or self._is_closing != was_closing, pause_s
                )
            self._news.wait_for(lambda: self._has_work() or self._is_closing)
            return self._has_work() and not self._is_over

    def _take(self) -> tuple[int, Change] | None:
        with self._news:
            self._sending = tuple(self._waiting)[:1]
            for trial in self._sending:
                return trial, self._waiting.pop(trial).change()
            return None

    def _tell(self, trial: int, change: Change) -> None:
        try:
            self._runs.tell(trial, change)
        except Exception:
            self._put_back(trial, change)
            raise
        with self._news:
            self._sending = ()
            if not self._is_over:
                self._values -= len(change.values)

    def _put_back(self, trial: int, change: Change) -> None:
        """Before what came meanwhile; its values are counted already."""
        with self._news:
            self._sending = ()
            if self._is_over:
                return
            later = self._waiting.pop(trial, None)
            back = self._waiting[trial] = Waiting()
            back.add(change, len(change.values))
            if later is not None:
                back.add(later.change(), len(later.values))
