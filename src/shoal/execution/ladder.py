"""What to try when a trial runs out of memory, in order. Pure.

No rung changes the numerics key: the optimizer steps where it did, micro-batches stay as they
are, and how many shards there are is placement.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.core.plan import Resident, Spilled, Technique
from shoal.core.spec import Place

_GROWTH = 1.5
MAX_RUNGS = 8


def next_technique(technique: Technique, shards: int, place: Place) -> Spilled:
    """The next thing to try; whether it can be done is the planner's to find.

    Args:
        technique: What just failed.
        shards: How many shards it had.
        place: Where the optimizer steps; it goes on stepping there.
    """
    if isinstance(technique, Resident):
        return Spilled(optimizer=place)
    if technique.lookahead != 0:
        return replace(technique, shards=shards, lookahead=0, optimizer=place)
    more = max(shards + 1, round(shards * _GROWTH))
    return replace(technique, shards=more, lookahead=0, optimizer=place)
