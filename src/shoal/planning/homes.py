"""Trials whose state is larger than the host may keep: told before one of them is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.errors import TooLarge
from shoal.core.units import format_bytes, format_enough, list_some
from shoal.runtime.wire.messages import Noticed


@dataclass(frozen=True, slots=True)
class HomeRoom:
    """What one trial may have of the host, in bytes; None for any number.

    ``free``: what there is, where a model is measured whole wherever its home is later.
    ``each_alone``: a trial that is too large fails alone, as one that a search chose does.
    """

    limit: int | None = None
    free: int = 0
    each_alone: bool = False

    def refused(self, noticed: Mapping[int, Noticed]) -> dict[int, str]:
        """By trial why it has no room, whatever is measured of it.

        Raises:
            TooLarge: there is one, and such do not fail alone; names the first, and the others.
        """
        if self.limit is None:
            return {}
        large = {n: one.state_bytes for n, one in noticed.items() if one.state_bytes > self.limit}
        found = {number: self._words(number, large[number]) for number in sorted(large)}
        if found and not self.each_alone:
            others = f" {len(found)} trials do not fit: {list_some([*found])}." * (len(found) > 1)
            raise TooLarge(f"{found[min(found)]}{others}")
        return found

    def _words(self, number: int, needed: int) -> str:
        where = ", or spill_dir= (--spill-dir), a directory on a disk" * (needed <= self.free)
        return (
            f"trial {number} needs {format_enough(needed)} or more on the host for its "
            "parameters, gradients and optimizer state, of "
            f"{format_bytes(self.limit or 0)} that may be used there. Train a smaller "
            f"model, or give host_memory= more{where}."
        )


ANY_ROOM = HomeRoom()
