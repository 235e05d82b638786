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
    """``seconds`` of a step of an array, by width; 1 is a trial alone. Of two equals the wider.

    A width is for all numbers up to its most, so one ends before the first for which it is not
    worth it, though a narrower one might be.
    """
    widths = sorted(seconds, reverse=True)

    def costs(trials: int, width: int) -> float:
        each = math.ceil(math.ceil(trials / devices) / width)
        return each * seconds[width] * (1 if width == widths[0] else 1 / WORTH)

    numbers = range(1, widths[0] * devices + 1)
    chosen = {n: min(widths, key=lambda w: (costs(n, w), -w)) for n in numbers}
    found, least = [], 0
    for width in reversed(widths[1:]):
        most = least
        while most + 1 in chosen and chosen[most + 1] <= width:
            if costs(most + 1, width) >= costs(most + 1, widths[0]):
                break
            most += 1
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
