"""Making a source's iterator and fetching from it; the face of sources with and without
processes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

from shoal.data.rows import take_rows_at_once
from shoal.recipes.recipe import Batch

END: Final = object()
"""What a fetch gives after an epoch's last batch."""


class Reader(Protocol):
    """Reads one source. Owns what reading starts: an iterator is closed by who opened it."""

    def open(self) -> Iterator[Batch]:
        """An iterator over one epoch."""

    def fetch(self, iterator: Iterator[Batch]) -> Any:
        """The next batch, or ``END``."""

    def close(self) -> None:
        """End what runs for the source. It can be opened again, as if it were new."""


class PlainReader:
    """A source that is read in this process and on this thread."""

    def __init__(self, source: Iterable[Batch]) -> None:
        self._source = source

    def open(self) -> Iterator[Batch]:
        return take_rows_at_once(iter(self._source), self._source)

    def fetch(self, iterator: Iterator[Batch]) -> Any:
        return next(iterator, END)

    def close(self) -> None:
        pass
