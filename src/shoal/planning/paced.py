"""Schedules that count steps where epochs were meant: what is refused, and what is warned of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shoal.core.units import counted
from shoal.runtime.messages import Noticed, Pace

_SEVERAL = 3
"""Steps that an epoch has at least, so that a count of epochs is none of steps."""
_NOTHING = 1e-6
"""A rate that is so small a part of what it was trains no more: nobody means that."""


class Length(NamedTuple):
    """The steps of a trial; ``epochs`` of so many steps ``each``, 0 where it is told in steps."""

    steps: int
    epochs: int
    each: int


def length_of(
    batches: int | None, accumulate: int, steps: int | None, total: int | None
) -> Length:
    """Of a trial whose epochs have so many ``batches``; ``steps``: as it was told, if in steps."""
    if steps is not None or not batches or total is None:
        return Length(steps or total or 0, 0, 0)
    each = -(-batches // accumulate)
    return Length(total, total // each, each)


def too_short(noticed: Mapping[int, Noticed], lengths: Mapping[int, Length]) -> dict[int, str]:
    """By trial why its schedule cannot be stepped as often as it has steps."""
    found = {}
    for number, one in noticed.items():
        for pace in one.paces:
            if pace.option == "total_steps" and pace.count < lengths[number].steps:
                found[number] = _refusal(number, pace, lengths[number])
    return found


def pace_warnings(
    noticed: Mapping[int, Noticed], lengths: Mapping[int, Length]
) -> tuple[str, ...]:
    """A line for each kind of schedule that seems to count epochs, of the first trial with it."""
    found: dict[tuple[str, str], str] = {}
    for number, one in sorted(noticed.items()):
        for pace in one.paces:
            if _means_epochs(pace, lengths[number]):
                words = _warning(number, pace, lengths[number])
                found.setdefault((pace.kind, pace.option), words)
    return tuple(found.values())


def _means_epochs(pace: Pace, length: Length) -> bool:
    if not 0 < pace.count <= length.epochs or length.each < _SEVERAL:
        return False
    if pace.option == "step_size":  # a small one is meant where it takes little away
        falls = length.steps // int(pace.count)
        return pace.gamma is not None and abs(pace.gamma) ** falls < _NOTHING
    return pace.option == "T_max" or (pace.gamma is not None and pace.gamma < 1)


def _refusal(number: int, pace: Pace, length: Length) -> str:
    return (
        f"the schedule of trial {number} is {_called(pace)}, which can be stepped "
        f"{counted(int(pace.count), 'time')}, and the trial trains for "
        f"{counted(length.steps, 'step')}{_epochs(length)}. A schedule is stepped after each "
        f"step, not after each epoch. Make it with {pace.option}={length.steps}."
    )


def _warning(number: int, pace: Pace, length: Length) -> str:
    in_steps = f"{pace.option}={pace.count} * {length.each}"
    if pace.option == "milestones":
        in_steps = f"milestones=[{length.each} * epoch for epoch in ...]"
    return (
        f"the schedule of trial {number} is {_called(pace)}, and it is stepped after each step, "
        f"not after each epoch: the trial trains for {counted(length.steps, 'step')}"
        f"{_epochs(length)}. If {pace.option} counts epochs, multiply by the steps of one: "
        f"{in_steps}."
    )


def _called(pace: Pace) -> str:
    count = f"[..., {pace.count}]" if pace.option == "milestones" else pace.count
    return f"{pace.kind}({pace.option}={count})"


def _epochs(length: Length) -> str:
    return f", {counted(length.epochs, 'epoch')} of {length.each}" if length.epochs else ""
