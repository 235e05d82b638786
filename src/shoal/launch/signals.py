"""Ctrl-C and SIGTERM while a study runs: save, then leave; a second one leaves at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from shoal.runtime.pool import WorkerPool

PAUSED = 75  # EX_TEMPFAIL: the same command goes on
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """The process ends since it was asked to; all that can be saved is.

    ``has_begun``: whether there is a study to go on with.
    """

    was_interrupted = True

    def __init__(self) -> None:
        super().__init__(PAUSED)
        self.has_begun = True


class Interrupts:
    """Listens while its block runs, in the main thread; elsewhere it does nothing.

    Until ``stop_by`` is called nothing is worth saving, and the first signal leaves.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._before: dict[int, Any] = {}
        self.stop: Callable[[str], None] | None = None
        self.received: signal.Signals | None = None

    def __enter__(self) -> Interrupts:
        if self.listen_here():
            self._before = {number: signal.signal(number, self._take) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is None:
            self.heed()  # it came when all was done, and nobody has looked since

    def stop_by(self, stop: Callable[[str], None]) -> None:
        """From now on the first signal stops the study, and saves it.

        Raises:
            Interrupted: one came before, and whose code it met swallowed that.
        """
        self.heed()
        self.stop = stop

    def heed(self) -> None:
        """Leave if one came, and code that it met swallowed the exception."""
        if self.received is not None:
            self.leave()

    @staticmethod
    def listen_here() -> bool:
        """Whether this thread is the one that hears of signals."""
        return threading.current_thread() is threading.main_thread()

    def _take(self, number: int, frame: FrameType | None) -> None:
        first, self.received = self.received is None, signal.Signals(number)
        stop = self.stop
        if not first or stop is None:
            self.leave()
        reason = f"{signal.Signals(number).name} was received"
        self._pool.post(lambda: stop(reason) if stop else None)

    def leave(self) -> None:
        """End the process with exit code 75; at a prompt, the call alone with an interrupt."""
        if self.received == signal.SIGINT and _has_prompt():
            raise KeyboardInterrupt
        raise Interrupted


def _has_prompt() -> bool:
    """Whether somebody types at this process: a shell of Python's or IPython's, a notebook."""
    ipython = sys.modules.get("IPython")
    return hasattr(sys, "ps1") or (ipython is not None and ipython.get_ipython() is not None)
