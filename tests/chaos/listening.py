"""What a study says while it runs, and commands sent to it at a given moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from shoal.control import send
from shoal.core.errors import SpecError
from shoal.core.event import Event
from shoal.execution import floor
from shoal.launch.commands import Commands

PATIENCE_S = 60.0


@contextmanager
def short_leases(monkeypatch):
    """Two steps a lease: no trial is through before it is stopped."""
    with monkeypatch.context() as short:
        short.setattr(floor, "LEASE_S", 1e-3)
        short.setattr(floor, "STEADY_S", 0.0)
        yield


class Heard:
    """All events of a study, in order; a callback."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, *kinds: type[Event], trial: int | None = None) -> list[Event]:
        """Those of some kinds, and of one trial."""
        found = [event for event in self.events if isinstance(event, kinds)]
        return [e for e in found if trial is None or getattr(e, "trial", None) == trial]


class Orders:
    """Sends commands to a running study when something happens; a callback.

    The study's loop goes on only when the command is in its hands, so that a trial with
    steps left cannot end before.
    """

    def __init__(self, directory: Path, monkeypatch) -> None:
        self.directory, self.answers = directory, {}
        self._waiting: list[tuple[Callable[[Event], bool], Callable[[], object], str]] = []
        self._threads: list[threading.Thread] = []
        self._delivered = threading.Semaphore(0)
        deliver = Commands.deliver

        def delivered(commands, command, answer):
            deliver(commands, command, answer)
            self._delivered.release()

        monkeypatch.setattr(Commands, "deliver", delivered)

    def at(self, happens: Callable[[Event], bool], command, name: str) -> None:
        """When ``happens`` is true of an event, send; the answer is kept under ``name``.

        ``command`` may be a function to call instead; it sends one command.
        """
        act = command if callable(command) else lambda: send(self.directory, command)
        self._waiting.append((happens, act, name))

    def __call__(self, event: Event) -> None:
        for entry in [entry for entry in self._waiting if entry[0](event)]:
            self._waiting.remove(entry)
            thread = threading.Thread(target=self._send, args=entry[1:], daemon=True)
            self._threads.append(thread)
            thread.start()
            assert self._delivered.acquire(timeout=PATIENCE_S)

    def _send(self, act: Callable[[], object], name: str) -> None:
        try:
            self.answers[name] = act()
        except SpecError as error:
            self.answers[name] = error

    def join(self) -> dict[str, object]:
        """The answers, when all are there."""
        assert not self._waiting, "a moment never came"
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return self.answers
