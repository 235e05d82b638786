"""Schedules that count steps where epochs were meant: what is refused, and what is warned of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shoal.core.units import counted
from shoal.runtime.wire.messages import Noticed, Pace

_SEVERAL = 3
"""Steps that an epoch has at least, so that a count of epochs is none of steps."""
_LASTING = ("T_max", "T_0", "total_iters")
"""What counts a fall of the rate that is to take all of a trial, or a good part."""
_NOTHING = 1e-6
"""A rate that is so small a part of what it was trains no more: nobody means that."""


class Length(NamedTuple):
    """The steps of a trial; ``epochs`` of so many steps ``each``, 0 where it is told in steps.

    ``by_epochs``: its schedule is stepped after each epoch.
    """

    steps: int
    epochs: int
    each: int
    by_epochs: bool = False

    @property
    def turns(self) -> int:
        """How often its schedule is stepped."""
        return self.epochs if self.by_epochs else self.steps


def length_of(
    batches: int | None,
    accumulate: int,
    steps: int | None,
    total: int | None,
    *,
    by_epochs: bool = False,
) -> Length:
    """Of a trial whose epochs have so many ``batches``; ``steps``: as it was told, if in steps."""
    is_told_in_steps = steps is not None and not by_epochs
    if is_told_in_steps or not batches or total is None:
        return Length(steps or total or 0, 0, 0, by_epochs)
    each = -(-batches // accumulate)
    return Length(total, total // each, each, by_epochs)


def too_short(noticed: Mapping[int, Noticed], lengths: Mapping[int, Length]) -> dict[int, str]:
    """By trial why its schedule cannot be stepped as often as it has steps."""
    found = {}
    for number, one in noticed.items():
        for pace in one.paces:
            if pace.option == "total_steps" and pace.count < lengths[number].turns:
                found[number] = _refusal(number, pace, lengths[number])
    return found


def pace_warnings(
    noticed: Mapping[int, Noticed], lengths: Mapping[int, Length]
) -> tuple[str, ...]:
    """A line for each kind of schedule that seems to count epochs where it is stepped after each
    step, or steps where it is after each epoch, of the first trial with it."""
    found: dict[tuple[str, str], str] = {}
    for number, one in sorted(noticed.items()):
        for pace in one.paces:
            length = lengths[number]
            means_others = _means_steps if length.by_epochs else _means_epochs
            if means_others(pace, length):
                words = _warning(number, pace, length)
                found.setdefault((pace.kind, pace.option), words)
    return tuple(found.values())


def _means_epochs(pace: Pace, length: Length) -> bool:
    if pace.option == "gamma":
        return _left(pace, length) < _NOTHING
    if not 0 < pace.count <= length.epochs or length.each < _SEVERAL:
        return False
    if pace.option == "step_size":  # a small one is meant where it takes little away
        falls = length.steps // int(pace.count)
        return pace.gamma is not None and abs(pace.gamma) ** falls < _NOTHING
    return pace.option in _LASTING or (pace.gamma is not None and pace.gamma < 1)


def _means_steps(pace: Pace, length: Length) -> bool:
    if pace.option == "gamma":
        return False
    return length.epochs < length.steps <= pace.count and pace.option != "step_size"


def _left(pace: Pace, length: Length) -> float:
    """What part of its first one the last rate is, where each step takes a part of it."""
    return abs(pace.count) ** length.turns if abs(pace.count) < 1 else 1.0


def _refusal(number: int, pace: Pace, length: Length) -> str:
    when = "epoch" if length.by_epochs else "step, not after each epoch"
    return (
        f"the schedule of trial {number} is {_called(pace)}, which can be stepped "
        f"{counted(int(pace.count), 'time')}, and the trial trains for "
        f"{counted(length.steps, 'step')}{_epochs(length)}. A schedule is stepped after each "
        f"{when}. Make it with {pace.option}={length.turns}{_or_epochs(length)}."
    )


def _warning(number: int, pace: Pace, length: Length) -> str:
    if length.by_epochs:
        return (
            f"the schedule of trial {number} is {_called(pace)}, and it is stepped after each "
            f"epoch, {counted(length.epochs, 'time')}: {pace.option} seems to count steps. Count "
            "epochs, or leave out schedule_interval='epoch'."
        )
    if pace.option == "gamma":
        return _warning_of_fall(number, pace, length)
    in_steps = f"{pace.option}={pace.count} * {length.each}"
    if pace.option == "milestones":
        in_steps = f"milestones=[{length.each} * epoch for epoch in ...]"
    return (
        f"the schedule of trial {number} is {_called(pace)}, and it is stepped after each step, "
        f"not after each epoch: the trial trains for {counted(length.steps, 'step')}"
        f"{_epochs(length)}. If {pace.option} counts epochs, say so with "
        f"Recipe(schedule_interval='epoch'), or multiply by the steps of one: {in_steps}."
    )


def _warning_of_fall(number: int, pace: Pace, length: Length) -> str:
    root = f"{pace.count} ** (1 / {length.each})"
    left = f"{_left(pace, length):.0e}".replace("0e+00", "nothing")
    milder = f"take its root: gamma={root}" if length.each else "take one that is nearer to 1"
    return (
        f"the schedule of trial {number} is {_called(pace)}, and it is stepped after each step, "
        f"not after each epoch: the trial trains for {counted(length.steps, 'step')}"
        f"{_epochs(length)}, and its last rate is {left} of the first one. If "
        "gamma is meant for an epoch, say so with Recipe(schedule_interval='epoch'), or "
        f"{milder}."
    )


def _or_epochs(length: Length) -> str:
    is_in_epochs = length.epochs and not length.by_epochs
    return ", or say that it counts epochs, with schedule_interval='epoch'" * bool(is_in_epochs)


def _called(pace: Pace) -> str:
    count = f"[..., {pace.count}]" if pace.option == "milestones" else pace.count
    return f"{pace.kind}({pace.option}={count})"


def _epochs(length: Length) -> str:
    return f", {counted(length.epochs, 'epoch')} of {length.each}" if length.epochs else ""
