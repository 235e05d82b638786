"""Whether a resident trial's passes are captured, where nobody says so. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.spec import CaptureMeasure
from shoal.core.units import Seconds, format_seconds

LIGHT_S = 0.01
"""Of a step that takes more, little is Python."""
HOPE = 0.2
"""By what part steps may be hoped to be quicker, before anybody looks."""
LOOK_S = 0.4
"""Seconds that a look is reckoned to take: to make a capture, and to time it."""
WORTH = 0.95
"""A captured step has to take less than this part of an eager one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What the trials of a shape are to do: ``steps`` of each, None where nobody knows.

    ``trials`` follow each other on a device; ``step_s`` is what a step takes eagerly, of
    ``passes`` passes. ``shares``: one capture serves all trials on a device.
    """

    steps: int | None
    trials: int
    step_s: Seconds
    passes: int
    shares: bool

    @property
    def total(self) -> int | None:
        """Steps of a device, all in all."""
        return None if self.steps is None else self.steps * self.trials


def why_no_look(life: Life) -> str:
    """Why capturing a pass, to see what it takes, brings nothing back; empty if it may."""
    if life.total is None:
        return "how long the trials are is not known"
    if life.step_s > LIGHT_S:
        return f"a step takes {format_seconds(life.step_s)}, little of which is Python"
    if HOPE * life.total * life.step_s > LOOK_S:
        return ""
    all_s = format_seconds(life.total * life.step_s)
    return f"all steps of a device take {all_s}, too little for a look to be worth it"


def captured_step_s(found: CaptureMeasure, life: Life) -> Seconds:
    """Of a step whose passes are captured; what is no pass stays as it is."""
    return Seconds(max(life.step_s - life.passes * (found.eager_s - found.captured_s), 1e-6))


def gains(found: CaptureMeasure, life: Life) -> bool:
    """Whether steps are clearly quicker, and make up for the making of the capture."""
    if found.declined:
        return False
    step_s = captured_step_s(found, life)
    if step_s > WORTH * life.step_s or found.captured_s * (1 + found.noise) > found.eager_s:
        return False
    return life.total is not None and (
        (life.step_s - step_s) * life.total > _making_s(found, life)
    )


def _making_s(found: CaptureMeasure, life: Life) -> float:
    """Of all trials on a device: making it, or a few passes to compare where it is shared."""
    if not life.shares:
        return life.trials * found.make_s
    return found.make_s + (life.trials - 1) * 2 * (found.eager_s + found.captured_s)


def told(found: CaptureMeasure, *, taken: bool) -> str:
    """What was found, in words."""
    if found.declined:
        return f"captured: none, {found.declined}"
    figures = (
        f"a pass takes {format_seconds(found.captured_s)}, eager "
        f"{format_seconds(found.eager_s)}, made in {format_seconds(found.make_s)}"
    )
    if taken:
        return f"captured, to the same bits: {figures}"
    return f"captured: {figures}: no clear gain over the trial's life"
