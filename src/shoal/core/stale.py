"""What a recipe says of gradients of weights that are one step old."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.errors import SpecError
from shoal.core.values import flag, is_number, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale:
    """Stale weights are allowed, and what a step with them is worth.

    ``Recipe(stale=shoal.Stale(efficiency=0.8))`` lets the planner weigh ``"2bw"`` among the
    schedules of a pipeline. ``efficiency`` is the part of a synchronous step's progress towards a
    loss that a step with weights one step old makes, above 0 and up to 1; with ``predict`` it is
    that of gradients at a guess of the newer weights. There is no default: it was between 0.44 and
    0.93 for one small model here, by the learning rate, and 0.8 is what the authors of
    PipeDream-2BW have for a long training of GPT. ``shoal.testing.stale_efficiency`` measures it.

    Raises:
        SpecError: no such part; says what was given.
    """

    efficiency: float
    predict: bool = False

    def __post_init__(self) -> None:
        efficiency = plain(self.efficiency)
        if not is_number(efficiency) or not 0 < efficiency <= 1:
            raise SpecError(
                "Stale(efficiency=...) is the part of a synchronous step's progress that a step "
                f"with stale weights makes, above 0 and up to 1, got {self.efficiency!r}. Measure "
                "it with shoal.testing.stale_efficiency, or leave Recipe(stale=...) out."
            )
        object.__setattr__(self, "efficiency", float(efficiency))
        object.__setattr__(self, "predict", flag("Stale(predict=...)", self.predict))
