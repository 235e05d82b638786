"""What a trial's numerics key says of its array: how the passes ran, and what was there once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

ARRAY_KEYS = frozenset(
    (
        *("array", "array_pass", "array_floats", "array_widths", "array_layouts"),
        "array_weights",
    )
)
"""What a numerics key says of a trial's array."""
ALL_LAYOUTS = {"array_layouts": "all"}
"""What it says where batches of every layout run stacked, and not of the first one's alone."""
ONE_BASE = {"array_weights": "frozen ones once"}
"""What it says where the weights that nothing trains are there once, for all slots."""
LEAST_BASE_BYTES = 1 << 16
"""Smaller ones have a row for each slot: biases, norms, a head that is drawn and not trained."""


def stacks_all(key: Mapping[str, object]) -> bool:
    """Whether batches of every layout run stacked, in an array of trials with such a key."""
    return key.items() >= ALL_LAYOUTS.items()


def has_one_base(key: Mapping[str, object]) -> bool:
    """Whether an array of trials with such a key has what is frozen once."""
    return key.items() >= ONE_BASE.items()


class Base(NamedTuple):
    """What tells the frozen weights that a trial may share, and their bytes; "" where none are.

    They are those that its model is built with: one that begins with the state of ``parent`` has
    what that has.
    """

    bits: str = ""
    num_bytes: int = 0
    parent: int | None = None


NO_BASE = Base()
