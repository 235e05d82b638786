"""Where the events of a run go: the database first, then whoever asked for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from shoal.core.event import Event
from shoal.observe.db import Database
from shoal.observe.snapshot import Snapshot

Callback = Callable[[Event], None]


@runtime_checkable
class LooksBack(Protocol):
    """A callback that goes on from what was before it, as a screen does."""

    def look_back(self, before: Snapshot) -> None: ...


class Sinks:
    """The database and the callbacks of one run; called from its main thread.

    ``check`` raises when what is written would reach nobody.
    """

    def __init__(
        self,
        database: Database,
        callbacks: Iterable[Callback],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._database, self._callbacks, self._check = database, list(callbacks), check
        self._held: list[Event] | None = None

    def hold(self) -> None:
        """Show what happens, and write none of it before ``release``: it may be refused."""
        self._held = []

    def release(self) -> None:
        """Write what was held back."""
        held, self._held = self._held or [], None
        if held:
            self._database.write(held)

    def add(self, callback: Callback) -> None:
        """Call it too from now on."""
        self._callbacks.append(callback)

    def look_back(self, before: Snapshot) -> None:
        """Tell callbacks that can draw it what the runs before came to."""
        for callback in self._callbacks:
            if isinstance(callback, LooksBack):
                callback.look_back(before)

    def write(self, happened: Sequence[Event]) -> None:
        """Database first; a callback that raises loses its place and stops nobody.

        Raises:
            StorageError: the batch could not be written, and no callback was called.
        """
        self._check()
        if self._held is None:
            self._database.write(happened)
        else:
            self._held += happened
        for callback in list(self._callbacks):
            try:
                for event in happened:
                    callback(event)
            except Exception as error:
                self._callbacks.remove(callback)
                warnings.warn(
                    f"callback {callback!r} raised {type(error).__name__}: {error}; the study "
                    "goes on without it.",
                    stacklevel=2,
                )
