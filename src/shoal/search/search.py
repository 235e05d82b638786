"""A search as it stands: facts in, trials to add and trials to end out.

[Note: generations]
Trials come in generations of a fixed number, in the order of their numbers. Generation g is asked
of the sampler when generations 0 to g-2 have all ended, and it is told exactly those, in order.
So devices are busy with g-1 while the last trials of g-2 end, and what trial n gets depends on
the seed, the space and values, not on who was quicker:

    known to the sampler     -    -    0   0,1  0,1,2
    generation asked         0    1    2    3    4

Some samplers have no more points at some time (Optuna's ``study.stop()``): then nobody is asked
for, and the search comes to fewer trials. A sampler says so when it is told of trials or asked for
points, which is in the same order whatever happened, so it is at the same trial each time.

[Note: rungs]
Rung r is a trial's evaluation number r. A trial waits at a rung until its generation is decided
there, which is when every trial of it has come so far or has ended, and all generations before
were decided at that rung. It has not trained past it, so no step is done in vain or dropped.
What happened stays: who trained past a rung, or was ended there, in an earlier run of the
study, is not asked about again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from math import inf

from shoal.core.errors import SpecError
from shoal.core.units import counted
from shoal.search.facts import Facts, How
from shoal.search.rules import Rule
from shoal.search.space import Point
from shoal.search.suggest import Suggester

LAG = 1
"""Generations that train while the sampler is asked for the next one."""


class Search:
    """The state of a search; trials are known by their numbers.

    Args:
        generation: Trials of each.
        rule: Who goes on at a rung; None where all do.
        suggester: Where points come from; None where all are known.
        total: How many trials it is to come to.
        asked: How many its user asked for, where the sampler has points for ``total`` alone.
    """

    def __init__(
        self,
        generation: int,
        rule: Rule | None,
        suggester: Suggester | None = None,
        total: int = 0,
        asked: int | None = None,
    ) -> None:
        self._size, self._rule = generation, rule
        self._suggester, self._total = suggester, total
        self.asked = total if asked is None else asked
        self.sampler = "" if suggester is None else suggester.name
        self._facts: list[Facts] = []  # in the order of numbers
        self._places: dict[int, int] = {}  # by number
        self._num_ended = 0  # from the first one on
        self._is_stale = False  # facts came since it was decided last
        self._told = 0  # generations that the sampler knows
        self._rungs: dict[int, float] = {}  # by generation: the rung to be decided next
        self.differs_from: int | None = None
        """The first trial on record that the sampler would have given another point."""

    # -- facts --------------------------------------------------------------------------------

    def enroll(self, number: int, point: Point) -> None:
        """A trial belongs to the search; in the order of numbers."""
        self._places[number] = len(self._facts)
        self._rungs.pop(len(self._facts) // self._size, None)  # its generation grew
        self._facts.append(Facts(point, number=number))
        self._is_stale = True

    def ends_at(self, number: int, rung: int, *, every: int, done: int = 0) -> None:
        """A trial's last evaluation; of every trial that has not ended, before ``decide``.

        It is evaluated each ``every`` steps, and has ``done`` so many.
        """
        if (facts := self._of(number)) is not None:
            facts.last, facts.every = rung, every
            facts.passed = done // every if every else 0

    def report(self, number: int, step: int, value: float) -> None:
        """A trial was evaluated."""
        if (facts := self._of(number)) is not None:
            facts.report(step, value)
            self._is_stale = True

    def end(self, number: int, how: How, value: float | None = None) -> None:
        """A trial has ended."""
        if (facts := self._of(number)) is not None:
            facts.how, facts.value = how, value
            self._is_stale = True

    def reopen(self, number: int) -> None:
        """A trial that had ended goes on."""
        if (facts := self._of(number)) is not None:
            facts.how = facts.value = None
            self._num_ended = min(self._num_ended, self._places[number])

    # -- what follows ---------------------------------------------------------------------------

    @property
    def to_come(self) -> int:
        """Trials that nobody knows yet."""
        if self._suggester is not None and self._suggester.is_over:
            return 0
        return max(0, self._total - len(self._facts))

    @property
    def expected(self) -> int:
        """How many trials there are to be, those that are known among them."""
        return len(self._facts) + self.to_come

    @property
    def can_ask(self) -> bool:
        """Whether ``more`` would give points, or find that there are none."""
        return self.to_come > 0 and self._may_ask(len(self._facts))

    def more(self) -> list[Point]:
        """The points of the trials that can be asked for now; they are to be enrolled.

        Raises:
            SpecError: the sampler cannot serve the space.
        """
        try:
            return self._more()
        except SpecError as error:
            if not (known := len(self._facts)):
                raise
            raise SpecError(
                f"{error} The {counted(known, 'trial')} that there are stay as they are. Mend the "
                "sampler and go on with it (accept_recipe=True, --accept-recipe), or give "
                f"trials={known}: then these are all, and those that have not ended train on."
            ) from error

    def _more(self) -> list[Point]:
        points: list[Point] = []
        suggester = self._suggester
        while suggester is not None and self._may_ask(place := len(suggester)):
            if place >= self._total:
                break
            self._tell(suggester, place)
            if suggester.is_over:
                break
            point = suggester.suggest()
            if place >= len(self._facts):
                points.append(point)
            elif not _is_same(point, self._facts[place].point):
                suggester.replace_last(self._facts[place].point)
                if self.differs_from is None:
                    self.differs_from = list(self._places)[place]
        return points

    def is_searched(self, number: int) -> bool:
        """Whether the trial is one of the search's: a clone is not."""
        return number in self._places

    def is_known_at(self, number: int, rung: int) -> bool:
        """Whether a trial was measured at a rung, or was there when the run began."""
        facts = self._of(number)
        return facts is not None and (facts.at(rung) is not None or rung <= facts.passed)

    def pruned_at(self, number: int) -> int | None:
        """The rung after which a trial is to train no more."""
        facts = self._of(number)
        return None if facts is None else facts.pruned_at

    @property
    def prunes(self) -> bool:
        """Whether trials are ended at rungs."""
        return self._rule is not None

    @property
    def why(self) -> str:
        """What is to say of a trial that is pruned; the metric follows."""
        return self._rule.why if self._rule is not None else ""

    def next_rung(self, number: int, least: int = 1) -> int | None:
        """The rung from ``least`` on where a trial is to wait; None: it trains to its end."""
        place = self._places.get(number)
        if place is None or self._rule is None:
            return None
        if (pruned := self._facts[place].pruned_at) is not None:
            return pruned
        rung = self._rungs.get(place // self._size, 1)
        if rung == inf:
            return None
        rung = max(int(rung), least)
        while not self._rule.is_rung(place, rung):
            rung += 1
        return rung

    def is_decided_at(self, number: int, rung: int) -> bool:
        """Whether it is known who of its generation goes on after a rung."""
        place = self._places[number]
        return self._rungs.get(place // self._size, 1) > rung

    @property
    def in_flight(self) -> int:
        """Generations that train side by side, about: all there are, if nobody asks for them."""
        known = -(-max(len(self._facts), self._total) // self._size)
        return max(1, known if self._suggester is None else min(LAG + 1, known))

    def rungs_of(self, number: int) -> Iterator[int]:
        """The rungs at which a trial is compared, without an end."""
        place, rule = self._places[number], self._rule
        return filter(partial(rule.is_rung, place), count(1)) if rule is not None else iter(())

    def cohort_of(self, number: int) -> tuple[int, int]:
        """A trial's generation, and which of it are compared at the same rungs."""
        assert self._rule is not None
        place = self._places[number]
        return place // self._size, self._rule.cohort(place)

    def cohort(self, generation: int, cohort: int) -> list[int]:
        """The trials of a generation that are compared with each other."""
        assert self._rule is not None
        numbers, members = list(self._places), self._members(generation)
        return [numbers[place] for place in members if self._rule.cohort(place) == cohort]

    def size_of(self, generation: int) -> int:
        """How many trials a generation has so far."""
        return len(self._members(generation))

    def went_on(self, number: int, rung: int) -> bool:
        """Whether it is on record that a trial trained on after a rung."""
        return self._facts[self._places[number]].went_on(rung)

    def goes_on_after(self, number: int, rung: int) -> bool:
        """Whether a trial went on after a rung that is decided."""
        return self._facts[self._places[number]].goes_on_after(rung)

    def decide(self) -> None:
        """Draw every conclusion that the facts allow."""
        is_stale, self._is_stale = self._is_stale, False
        before = inf  # the rung that all generations before have been decided up to
        for generation in self._generations() if is_stale else ():
            while self._rungs[generation] < before and self._is_ready(generation):
                self._decide(generation)
            before = min(before, self._rungs[generation])

    # -- the sampler --------------------------------------------------------------------------

    def _may_ask(self, place: int) -> bool:
        return self._has_ended(place // self._size - LAG - 1)

    def _has_ended(self, generation: int) -> bool:
        """Whether this one and all before it have; there may be none yet."""
        facts = self._facts
        while self._num_ended < len(facts) and facts[self._num_ended].how is not None:
            self._num_ended += 1
        return (generation + 1) * self._size <= self._num_ended

    def _tell(self, suggester: Suggester, place: int) -> None:
        """Tell all that counts for the point of the trial at ``place``."""
        while self._told <= place // self._size - LAG - 1:
            first = self._told * self._size
            for index in range(first, first + self._size):
                suggester.tell(index, self._facts[index])
            self._told += 1

    # -- rungs --------------------------------------------------------------------------------

    def _of(self, number: int) -> Facts | None:
        place = self._places.get(number)
        return None if place is None else self._facts[place]

    def _members(self, generation: int) -> range:
        first = generation * self._size
        return range(first, min(first + self._size, len(self._facts)))

    def _generations(self) -> range:
        """All that have rungs to be decided, or had."""
        generations = range(-(-len(self._facts) // self._size) if self._rule is not None else 0)
        for generation in generations:
            self._rungs.setdefault(generation, 1)
        return generations

    def _is_ready(self, generation: int) -> bool:
        """Whether all of a generation came to its next rung, or ended before."""
        rung, rule = self._rungs[generation], self._rule
        assert rule is not None
        if rule.needs_ends and not self._has_ended(generation - 2):
            return False
        there = [(place, self._facts[place]) for place in self._members(generation)]
        return all(
            not rule.is_rung(place, int(rung))
            or facts.at(int(rung)) is not None
            or facts.is_never_at(int(rung))
            for place, facts in there
        )

    def _decide(self, generation: int) -> None:
        """Decide one rung; a generation of which nobody trains on is decided for good."""
        rule, rung = self._rule, int(self._rungs[generation])
        assert rule is not None
        members = self._members(generation)
        seen = self._facts[: members.stop]
        asked = {p for p in members if rule.is_rung(p, rung) and seen[p].is_asked_at(rung)}
        if asked:
            for place in rule.prune(rung, seen, asked, max(0, members.start - self._size)):
                if not seen[place].went_on(rung):
                    seen[place].pruned_at = rung
        is_over = all(seen[place].is_over_before(rung + 1) for place in members)
        self._rungs[generation] = inf if is_over else rung + 1


def _is_same(point: Point, other: Point) -> bool:
    """Equal values of equal types under equal names."""
    return {k: (type(v), v) for k, v in point.items()} == {
        k: (type(v), v) for k, v in other.items()
    }
