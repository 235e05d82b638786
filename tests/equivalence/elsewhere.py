"""A second file of a recipe's, which counts in a global of its own."""

from __future__ import annotations

COUNT = 0


def weight() -> float:
    """Less each time."""
    global COUNT
    COUNT += 1
    return 1 / (1 + 0.1 * COUNT)
