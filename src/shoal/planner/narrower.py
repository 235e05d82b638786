"""In which arrays the last trials of a generation go on, when others were pruned. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.core.seats import ALONE
from shoal.core.spec import WidthMeasure
from shoal.planner.lanes import Load
from shoal.planner.width import WORTH


class Narrower(NamedTuple):
    """The last ``most`` trials of a generation go on in arrays of ``width``; 1: one by one."""

    width: int
    most: int


def narrower(
    best: WidthMeasure, others: Sequence[WidthMeasure], load: Load, valid_batches: int
) -> tuple[Narrower, ...]:
    """Up to how many trials which widths are quicker than the one that was chosen; widest first.

    ``others`` are measured and fit.
    """
    every = load.every or max(load.steps)
    batches = valid_batches / every
    steps = max(load.steps)
    seconds = {best.width: best.step_s + batches * best.valid_s}
    for found in others:
        each_s = found.step_s + batches * found.valid_s
        saves_s = (seconds[best.width] - each_s) * steps / 2
        if found.width < best.width and saves_s > found.build_s:
            seconds[found.width] = min(each_s, seconds.get(found.width, math.inf))
    seconds[ALONE] = best.alone_s + batches * best.alone_valid_s
    return _thresholds(seconds, load.devices)


def _thresholds(seconds: Mapping[int, float], devices: int) -> tuple[Narrower, ...]:
    """``seconds`` of a step of an array, by width; 1 is a trial alone. Of two equals the wider."""
    widths = sorted(seconds, reverse=True)
    chosen = []
    for trials in range(1, widths[0] * devices + 1):
        each = math.ceil(trials / devices)
        takes = {width: math.ceil(each / width) * seconds[width] for width in widths}
        chosen.append(
            min(widths, key=lambda w: (takes[w] * (1 if w == widths[0] else 1 / WORTH), -w))
        )
    found, least = [], 0
    for width in reversed(widths[1:]):
        most = next((n for n, w in enumerate(chosen) if w > width), len(chosen))
        if most > least:
            found.append(Narrower(width, most))
            least = most
    return tuple(reversed(found))


def told(width: int, rest: Sequence[Narrower]) -> str:
    """As the numerics key of a trial has them that gets other seats: its own width, then those."""
    return ", ".join([str(width), *(f"{width} for {most}" for width, most in rest)])


def from_key(numerics: Mapping[str, object]) -> tuple[Narrower, ...]:
    """What a numerics key tells, but the trial's own width; nothing of one that keeps its seat."""
    parts = [part.split(" for ") for part in str(numerics.get("array_widths", "")).split(", ")]
    return tuple(Narrower(int(part[0]), int(part[1])) for part in parts if len(part) == 2)
