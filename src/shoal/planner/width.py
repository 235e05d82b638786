"""How wide an array is to be, so that it never loses against its trials one by one. Pure.

The trials of one shape take a device in turns of ``width``; the last turn costs as much as a full
one. So what counts is how long all of them take, and not how quick a trial is in the widest array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shoal.core.spec import ArrayMeasure, WidthMeasure
from shoal.core.units import Seconds, format_seconds

MOST = 64  # slots
WORTH = 0.95
"""An array has to take less than this part of the time; what it costs in the bits' class, and in
waiting for each other, is not for nothing."""

Fits = Callable[[WidthMeasure], bool]


def widths_to_try(trials: int, devices: int) -> tuple[int, ...]:
    """Powers of two, and all of a device's trials, for ``trials`` on ``devices``."""
    each = min(MOST, math.ceil(trials / devices))
    powers = [1 << n for n in range(1, 7) if 1 << n < each]
    return (*powers, each) if each > 1 else ()


def choose_width(measure: ArrayMeasure, trials: int, devices: int, fits: Fits) -> tuple[int, str]:
    """The width with which all trials end first, 1 for none; and why, in words."""
    if measure.declined:
        return 1, f"unfused: {measure.declined}"
    each = math.ceil(trials / devices)
    able = [found for found in measure.widths if fits(found)]
    if not able:
        return 1, "unfused: no array of its shape fits the device"
    best = min(able, key=lambda found: (_all_s(found, each), found.width))
    alone_s = each * measure.alone_s
    tried = describe(measure)
    if _all_s(best, each) > WORTH * alone_s:
        return 1, f"unfused: arrays were measured and gain nothing ({tried})"
    return best.width, _praise(best, measure, tried)


def words_for(measure: ArrayMeasure, width: int) -> str:
    """What an array of a width that is settled already takes, in words."""
    found = next(found for found in measure.widths if found.width == width)
    return _praise(found, measure, describe(measure))


def describe(measure: ArrayMeasure) -> str:
    """How many times as fast as alone the widths are."""
    ratios = [
        f"{found.width} wide {found.width * measure.alone_s / found.step_s:.2f} times"
        for found in measure.widths
    ]
    return ", ".join(ratios)


def _praise(found: WidthMeasure, measure: ArrayMeasure, tried: str) -> str:
    alone = format_seconds(Seconds(found.width * measure.alone_s))
    slow = _some(measure.notes)
    return (
        f"a step of {found.width} as one array takes {format_seconds(found.step_s)}, one after "
        f"another {alone} ({tried}){slow}"
    )


def _some(notes: Sequence[str]) -> str:
    return f"; {'; '.join(notes[:3])}" if notes else ""


def _all_s(found: WidthMeasure, trials: int) -> float:
    """Seconds in which ``trials`` trials have done one step each."""
    return math.ceil(trials / found.width) * found.step_s
