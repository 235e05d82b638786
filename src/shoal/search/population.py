"""A population as it stands: facts in; who waits at which rung, and who copies whom, out.

[Note: a rung of a population]
All trials of the study wait at evaluation number ``interval``, twice that, and so on. When all are
there, or have ended, it follows from their values who copies whom. Nobody goes on before all of
that has happened and is on record, so a crash finds either every trial of the rung at it or
before it, or the whole exploit on record:

    trial 0   ...... rung |  saved            | goes on
    trial 1   .... rung   |                   | goes on
    trial 2   ........ rung  copies 0's state | goes on with 0's weights
                                              ^ one write of the database

What is on record is not decided again: it happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from shoal.search.facts import Facts, How
from shoal.search.pbt import PBT, Exploit, exploits
from shoal.search.space import Distribution, Point


class Population:
    """The state of population-based training; trials are known by their numbers.

    Args:
        space: The names that vary, each with what it is drawn from.
    """

    to_come, can_ask, differs_from = 0, False, None

    def __init__(
        self, asked: PBT, space: Mapping[str, Distribution], *, mode: str, seed: int
    ) -> None:
        self._asked, self._space, self._mode, self._seed = asked, space, mode, seed
        self._facts: dict[int, Facts] = {}
        self._happened: dict[int, dict[int, Exploit]] = {}  # by trial, by step
        self._every: int | None = None  # steps from one evaluation to the next
        self._rung: float = asked.interval  # the first that is not over
        self._is_stale = False
        self.due: Mapping[int, Exploit] = {}
        """By trial what is to happen now, all of it at once; empty while nothing is."""

    # -- facts --------------------------------------------------------------------------------

    def enroll(self, number: int, point: Point) -> None:
        """A trial belongs to the population."""
        self._facts[number] = Facts(point)
        self._is_stale = True

    def ends_at(self, number: int, rung: int, *, every: int, done: int = 0) -> None:
        """A trial's last evaluation; it is evaluated each ``every`` steps and did ``done``."""
        facts, self._every = self._facts[number], every
        facts.last, facts.passed = rung, done // every
        for known in self._facts.values():
            known.every = every
        self._is_stale = True

    def report(self, number: int, step: int, value: float) -> None:
        """A trial was evaluated."""
        if number in self._facts:
            self._facts[number].report(step, value)
            self._is_stale = True

    def exploited(self, number: int, step: int, exploit: Exploit) -> None:
        """A trial went on from another one's state."""
        self._happened.setdefault(number, {})[step] = exploit
        self._is_stale = True

    def end(self, number: int, how: How, value: float | None = None) -> None:
        """A trial has ended."""
        if number in self._facts:
            self._facts[number].how, self._facts[number].value = how, value
            self._is_stale = True

    def reopen(self, number: int) -> None:
        """A trial that had ended goes on."""
        if number in self._facts:
            self._facts[number].how = self._facts[number].value = None

    # -- what follows -------------------------------------------------------------------------

    def more(self) -> list[Point]:
        """No trial follows from others."""
        return []

    def is_searched(self, number: int) -> bool:
        """Whether the trial is of the population: a clone is not."""
        return number in self._facts

    def is_known_at(self, number: int, rung: int) -> bool:
        """Whether a trial was measured at a rung, or was there when the run began."""
        facts = self._facts.get(number)
        return facts is not None and (facts.at(rung) is not None or rung <= facts.passed)

    def pruned_at(self, number: int) -> int | None:
        """No trial is ended."""
        return None

    def happened(self, number: int) -> Mapping[int, Exploit]:
        """What a trial took over, by the step at which it did."""
        return self._happened.get(number, {})

    def next_rung(self, number: int, least: int = 1) -> int | None:
        """The rung from ``least`` on where a trial is to wait; None: it trains to its end."""
        if number not in self._facts or self._rung == inf:
            return None
        interval = self._asked.interval
        return max(int(self._rung), -(-least // interval) * interval)

    def decide(self) -> None:
        """Draw every conclusion that the facts allow."""
        is_stale, self._is_stale = self._is_stale, False
        while is_stale and self._rung < inf:
            rung = int(self._rung)
            if self._is_over(rung):
                self._rung = inf
            elif not self._is_past(rung):
                if not self._is_ready(rung):
                    self.due = {}
                    return
                self.due = self._decided(rung)
                if self.due:
                    return
            self._rung, self.due = self._rung + self._asked.interval, {}

    def _is_over(self, rung: int) -> bool:
        """Whether nobody comes to a rung and has more to do there."""
        known = self._facts.values()
        return all(f.how is not None or (f.last is not None and f.last <= rung) for f in known)

    def _is_past(self, rung: int) -> bool:
        """Whether somebody trained past it, or copied there or later: then it is all done."""
        past = (max(f.until(), default=0) > rung or f.passed > rung for f in self._facts.values())
        steps = (step for happened in self._happened.values() for step in happened)
        return any(past) or any(step >= rung * (self._every or 1) for step in steps)

    def _is_ready(self, rung: int) -> bool:
        known = self._facts.values()
        return all(f.at(rung) is not None or f.is_never_at(rung) for f in known)

    def _decided(self, rung: int) -> dict[int, Exploit]:
        there = {
            number: value
            for number, facts in self._facts.items()
            if facts.how is None
            and facts.is_asked_at(rung)
            and (value := facts.at(rung)) is not None
        }
        return exploits(
            self._asked,
            self._space,
            mode=self._mode,
            seed=self._seed,
            rung=rung,
            values=there,
            points={number: self._point(number) for number in there},
        )

    def _point(self, number: int) -> Point:
        """A trial's hyperparameters now."""
        happened = self.happened(number)
        return happened[max(happened)].hp if happened else self._facts[number].point
