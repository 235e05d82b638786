"""The seam between a feed and the ways to a position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from shoal.core.errors import TrialError
from shoal.data.position import Position
from shoal.data.reading import END
from shoal.data.sources import Rule
from shoal.recipes.recipe import Batch

Undo = Callable[[], None]


class Keeper(Protocol):
    """Opens and reads a source for a feed, and knows what leads to where the feed is."""

    rule: Rule

    def open(self) -> Iterator[Batch]:
        """The iterator of the next epoch."""

    def take(self, iterator: Iterator[Batch], index: int) -> Any:
        """Batch ``index`` of the epoch, or ``END``. On the path of every step."""
        return next(iterator, END)

    def settle(self) -> Keeper:
        """The first batch of all was read: who goes on."""
        return self

    def end_epoch(self, batches: int) -> None:
        """The epoch was read to its end."""
        return

    def fields(self, *, batch: int, begun: bool) -> dict[str, Any]:
        """What a position says beside where it is."""
        return {}

    def undo(self, *, opening: bool) -> Undo:
        """What puts the random streams back to before an ``open`` or ``take`` that failed."""
        return lambda: None

    def lead(self, position: Position) -> Iterator[Batch] | None:
        """Bring the source to ``position``; the iterator of its epoch if it has begun."""


def ended_early(name: str, found: int, read: int) -> TrialError:
    """The error for a source that has fewer batches than it had."""
    return TrialError(
        f"{name} ended after {found} batches of an epoch of which the trial had read {read}. "
        "Recipe(data=...) must build the same source each time."
    )
