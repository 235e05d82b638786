"""The order in which those that go on after a rung are given new seats. Pure.

[Note: closing ranks]
Where at most half of a generation's trials are left that had seats of their own, those that are
left get new ones, in the order of their numbers, after those of earlier generations:

    rung 1    0 . 2 . . . . 7 | . 9 . . . . . .       two generations of eight
    ranks     0   1         2 |   3                   among 3, and among 1

A rung is decided for a whole generation and after all before it, so a rank depends on nothing but
the values that trials reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from shoal.search.search import Search

SHRUNK = 0.5
"""Ranks are closed where no more than this part of the trials is left."""


class Rank(NamedTuple):
    """A trial's place among those that go on, and how many train side by side, about.

    ``had``: how many did where ranks were closed last.
    """

    place: int
    trials: int
    had: int


class Ranks:
    """Ranks after rungs that are decided.

    Args:
        group_of: Trials of one group share arrays; empty of a trial that trains in none.
    """

    def __init__(self, search: Search, group_of: Callable[[int], str]) -> None:
        self._search, self._group_of = search, group_of
        self._cohorts: dict[tuple[int, int, str], _Cohort] = {}

    def after(self, number: int, rung: int) -> Rank | None:
        """A trial's rank after a rung; None where ranks are not closed there."""
        search, group = self._search, self._group_of(number)
        if not group or not search.is_searched(number) or not search.is_decided_at(number, rung):
            return None
        generation, kind = search.cohort_of(number)
        mine = self._cohort(generation, kind, group)
        if not mine.has_shrunk(rung):
            return None
        going = mine.going(rung)
        if number not in going:
            return None
        before = (self._cohort(earlier, kind, group) for earlier in range(generation))
        place = sum(len(cohort.going(rung)) for cohort in before) + going.index(number)
        return Rank(place, len(going) * search.in_flight, mine.had(rung) * search.in_flight)

    def _cohort(self, generation: int, kind: int, group: str) -> _Cohort:
        key = generation, kind, group
        known = self._cohorts.get(key)
        if known is None or known.size < self._search.size_of(generation):  # it grew
            some = [t for t in self._search.cohort(generation, kind) if self._group_of(t) == group]
            known = _Cohort(self._search, some, self._search.size_of(generation))
            self._cohorts[key] = known
        return known


class _Cohort:
    """Trials of one generation that are compared with each other, and share arrays."""

    def __init__(self, search: Search, trials: Sequence[int], size: int) -> None:
        self._search, self._trials, self.size = search, trials, size
        self._going: dict[int, list[int]] = {}  # by rung
        self._shrunk: dict[int, bool] = {}
        self._had: dict[int, int] = {}  # before a rung

    def going(self, rung: int) -> list[int]:
        """Who goes on after a rung that is decided."""
        if rung not in self._going:
            goes_on = partial(self._search.goes_on_after, rung=rung)
            self._going[rung] = list(filter(goes_on, self._trials))
        return self._going[rung]

    def has_shrunk(self, rung: int) -> bool:
        """Whether so few go on there, of those that did where ranks were closed last."""
        if rung not in self._shrunk:
            had = len(self._trials)
            for at in self._search.rungs_of(self._trials[0]) if had else ():
                if at > rung:
                    break
                self._had[at] = had
                self._shrunk[at] = len(self.going(at)) <= SHRUNK * had
                had = len(self.going(at)) if self._shrunk[at] else had
        return self._shrunk.get(rung, False)

    def had(self, rung: int) -> int:
        """How many had seats before a rung that ``has_shrunk`` was asked about."""
        return self._had[rung]
