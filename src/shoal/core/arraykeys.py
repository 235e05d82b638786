"""What a trial's numerics key says of its array: how the passes ran, and what was there once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

ARRAY_KEYS = frozenset(
    (
        *("array", "array_pass", "array_floats", "array_widths", "array_layouts"),
        "array_weights",
        "array_looped",
    )
)
"""What a numerics key says of a trial's array."""
ALL_LAYOUTS = {"array_layouts": "all"}
"""What it says where batches of every layout run stacked, and not of the first one's alone."""
ONE_BASE = {"array_weights": "frozen ones once"}
"""What it says where the weights that nothing trains are there once, for all slots."""
LEAST_BASE_BYTES = 1 << 16
"""Smaller ones have a row for each slot: biases, norms, a head that is drawn and not trained."""


LOOPED = "array_looped"
"""Where it names the parts of the model that run slot by slot, since code in them decides by data.

A part that loops rounds as it does alone, and another way where it runs for all slots at once. So
those that a dry run found do from the first step on, whether or not slots decide alike: who is
beside a trial is nothing to its bits.
"""
LOSS, INPUTS = ".loss", ".inputs"
"""Parts beside the model's own, whose names begin with no dot: the recipe's loss, its inputs."""


def stacks_all(key: Mapping[str, object]) -> bool:
    """Whether batches of every layout run stacked, in an array of trials with such a key."""
    return key.items() >= ALL_LAYOUTS.items()


def has_one_base(key: Mapping[str, object]) -> bool:
    """Whether an array of trials with such a key has what is frozen once."""
    return key.items() >= ONE_BASE.items()


def looped_in(key: Mapping[str, object]) -> tuple[str, ...]:
    """The parts that run slot by slot in an array of trials with such a key (``LOOPED``)."""
    return tuple(filter(None, str(key.get(LOOPED, "")).split(", ")))


def told_of_looped(parts: Iterable[str]) -> str:
    """What ``looped_in`` reads; "" of none."""
    return ", ".join(sorted(set(parts)))


class Base(NamedTuple):
    """What tells the frozen weights that a trial may share, and their bytes; "" where none are.

    They are those that its model is built with: one that begins with the state of ``parent`` has
    what that has.
    """

    bits: str = ""
    num_bytes: int = 0
    parent: int | None = None


NO_BASE = Base()
