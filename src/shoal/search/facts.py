"""What a search knows of a trial: all that a decision may depend on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from shoal.search.space import Point

How = Literal["finished", "pruned", "failed"]


@dataclass(slots=True)
class Facts:
    """One trial of a search.

    Attributes:
        values: The metric at each evaluation; the first is of rung 1. What was once measured
            stays, also when a crash sets the trial back: training again gives the same.
        how: It ended; None while it has not.
        value: The metric at its end.
        pruned_at: The rung after which it trains no more, as was decided.
        last: The rung at its end, where nothing is left to decide; None where nobody said.
    """

    point: Point
    values: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # that the values are of
    how: How | None = None
    value: float | None = None
    pruned_at: int | None = None
    last: int | None = None

    def at(self, rung: int) -> float | None:
        """The metric at a rung; None if it was not evaluated there."""
        return self.values[rung - 1] if rung <= len(self.values) else None

    def report(self, step: int, value: float) -> None:
        """It was evaluated after ``step``; a second time changes nothing."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)

    def is_asked_at(self, rung: int) -> bool:
        """Whether it came to a rung and had more to do."""
        is_end = self.how == "finished" and rung >= len(self.values)
        return rung <= len(self.values) and not is_end and (self.last is None or rung < self.last)

    def went_on(self, rung: int) -> bool:
        """Whether it is known that it trained on after a rung."""
        return self.at(rung + 1) is not None or self.how in ("finished", "failed")

    def is_over_before(self, rung: int) -> bool:
        """Whether it will never have a value there."""
        return self.at(rung) is None and (self.how is not None or self.pruned_at is not None)


def rank(value: float, mode: str) -> float:
    """Smaller is better; what is no finite number comes last."""
    if not math.isfinite(value):
        return math.inf
    return value if mode == "min" else -value
