"""Whose batch it was for which a pass of an array had no room.

[Note: the largest batch]
Trials of an array may be at different steps, as those that came later are. If whoever is there
left it for good when memory lacks, how many steps of a trial were the array's would depend on when
it came. So those leave it whose batch of that pass is the largest. The others go back to their
newest generations and into the array, and leave it at a batch of their own, if at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shoal.core.errors import CapacityError
from shoal.data.sources import batch_bytes
from shoal.fusion.passes.fused import first_line, is_out_of_memory
from shoal.recipes.recipe import tensors_of


class Blame:
    """The bytes of each slot's largest batch of a pass that failed."""

    def __init__(self) -> None:
        self._sizes = Counter[int]()

    @contextmanager
    def over(self, row: Sequence[Any]) -> Iterator[None]:
        """A pass over these batches, by slot; they are looked at only if it fails."""
        self._sizes.clear()
        try:
            yield
        except BaseException:
            for slot, batch in enumerate(row):
                self.note(slot, batch)
            raise
        self._sizes.clear()

    def note(self, slot: int, batch: Any) -> None:
        """A batch of the pass; None where a slot has none."""
        size = sum(map(batch_bytes, tensors_of(batch)))
        self._sizes[slot] = max(size, self._sizes[slot])

    def told(self, error: BaseException, slots: Collection[int]) -> dict[int, BaseException]:
        """What each of these slots is told of an error of the whole pass."""
        largest = max((self._sizes[slot] for slot in slots), default=0)
        lacks_room = is_out_of_memory(error) or isinstance(error, CapacityError)
        others = CapacityError(f"no room for a batch of another trial: {first_line(error)}")
        others.is_anothers = True
        return {
            slot: others if lacks_room and self._sizes[slot] < largest else error for slot in slots
        }
