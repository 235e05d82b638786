"""What a search knows of a trial: all that a decision may depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shoal.search.space import Point

How = Literal["finished", "pruned", "failed"]


@dataclass(slots=True)
class Facts:
    """One trial of a search.

    Attributes:
        values: The metric at each evaluation that is on record, in order. What was once measured
            stays, also when a crash sets the trial back: training again gives the same.
        every: Steps between two rungs; None where nobody said, and then nothing is missing.
        passed: It was past this rung when the run began, measured on record or not: a record
            that is older than the trial's state may lack some of its values.
        how: It ended; None while it has not.
        value: The metric at its end.
        pruned_at: The rung after which it trains no more, as was decided.
        last: The rung at its end, where nothing is left to decide; None where nobody said.
        number: What it is called in the study, whose clones have numbers too.
    """

    point: Point
    values: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # that the values are of
    how: How | None = None
    value: float | None = None
    pruned_at: int | None = None
    last: int | None = None
    every: int | None = None
    passed: int = 0
    number: int = 0

    def at(self, rung: int) -> float | None:
        """The metric at a rung; None if it was not evaluated there."""
        there = (v for i, v in enumerate(self.values) if self._rung_of(i) == rung)
        return next(there, None)

    def until(self, rung: int | None = None) -> dict[int, float]:
        """By rung the values of all of them, or up to one."""
        found = {self._rung_of(index): value for index, value in enumerate(self.values)}
        return {at: value for at, value in found.items() if rung is None or at <= rung}

    def _rung_of(self, index: int) -> int:
        return index + 1 if self.every is None else -(-self.steps[index] // self.every)

    def report(self, step: int, value: float) -> None:
        """It was evaluated after ``step``; a second time changes nothing."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)

    def is_asked_at(self, rung: int) -> bool:
        """Whether it came to a rung and had more to do."""
        is_end = self.how == "finished" and rung >= max(self.until(), default=0)
        has_more = not is_end and (self.last is None or rung < self.last)
        return self.at(rung) is not None and has_more

    def went_on(self, rung: int) -> bool:
        """Whether it is known that it trained on after a rung."""
        known = rung < max(self.until(), default=0) or rung < self.passed
        return known or self.how == "finished"

    def goes_on_after(self, rung: int) -> bool:
        """Whether it came to a rung, had more to do, and was not ended there or before."""
        is_pruned = self.pruned_at is not None and self.pruned_at <= rung
        is_end = self.how in ("finished", "pruned") and rung >= max(self.until(), default=0)
        there = self.at(rung) is not None or rung < self.passed
        has_more = self.last is None or rung < self.last
        return there and has_more and not is_end and not is_pruned

    def is_over_before(self, rung: int) -> bool:
        """Whether it trains no more, and never came there."""
        return self.at(rung) is None and (self.how is not None or self.pruned_at is not None)

    def is_never_at(self, rung: int) -> bool:
        """Whether it will have no value there: it ended before, or its value is lost."""
        return self.is_over_before(rung) or (self.at(rung) is None and rung <= self.passed)
