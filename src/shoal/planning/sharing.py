"""How many trials share a device, where they are not all of one kind.

[Note: the mix]
What is best for many trials of one kind is settled with each kind. Trials of different kinds
fill each other's gaps: one is bound by the host's memory, another by the device, and one of
short steps waits long for one of long steps. So their mix is replayed, some steps of each, with
more and more of them at a time, as long as what they need fits. What stays on the device is
divided anew each time: a place costs room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shoal.core.units import Bytes
from shoal.planner.need import Request, fits, need
from shoal.planner.price import Speeds, mix_s, run_of
from shoal.planning.planned import Settled

MOST = 6
"""Trials of a mix that share a device at most, and as many are replayed."""
WORTH = 1.002
"""One more place has to make the mix so many times as fast; what it costs is replayed with it."""

Again = Callable[[Settled, int], Settled | None]
"""What stays of a kind where so many share the device; None where it does not fit."""


def share(
    settled: Mapping[str, Settled],
    present: Sequence[str],
    active: int,
    again: Again,
    request: Request,
    budget: Bytes,
    speeds: Speeds,
    *,
    by_epochs: bool = False,
) -> tuple[dict[str, Settled], int]:
    """The kinds as they train at the best number of places, and that number.

    Args:
        present: The kind of each trial of a device, in order.
        active: How many are best for one kind: the least that is considered.
        by_epochs: Trials end after as many epochs, not steps.
    """
    some = present[:MOST]
    best, places = dict(settled), active
    if len(set(some)) < 2 or len(some) <= active:
        return best, places
    lengths = _lengths(settled, by_epochs)
    taken_s = first_s = _seconds(best, some, active, request, speeds, lengths)
    for more in range(active + 1, len(some) + 1):
        found = {kind: again(one, more) for kind, one in settled.items()}
        fitting = {kind: one for kind, one in found.items() if one is not None}
        if len(fitting) < len(found) or not _fit(fitting, request, budget, more):
            break
        took_s = _seconds(fitting, some, more, request, speeds, lengths)
        if took_s * WORTH < taken_s:
            best, places, taken_s = fitting, more, took_s
    if places > active:
        why = (
            f"beside trials of other kinds {places} share the device: on paper their mix takes "
            f"{taken_s / first_s:.0%} of the time that {active} at a time take"
        )
        best = {kind: replace(one, why=(*one.why, why)) for kind, one in best.items()}
    return best, places


def _lengths(settled: Mapping[str, Settled], by_epochs: bool) -> dict[str, int]:
    """How many steps the kinds have, beside each other."""
    batches = {kind: one.measure.num_batches for kind, one in settled.items()}
    return {kind: (count or 1) if by_epochs else 1 for kind, count in batches.items()}


def _seconds(
    settled: Mapping[str, Settled],
    present: Sequence[str],
    active: int,
    request: Request,
    speeds: Speeds,
    lengths: Mapping[str, int],
) -> float:
    runs = {
        kind: run_of(s.measure.shards, s.measure.batch_bytes, s.technique, request, speeds)
        for kind, s in settled.items()
        if kind in present
    }
    return mix_s([replace(runs[kind], steps=lengths[kind]) for kind in present], active)


def _fit(settled: Mapping[str, Settled], request: Request, budget: Bytes, active: int) -> bool:
    needs = [
        need(s.measure, s.measure.shards, s.technique, request, s.layout) for s in settled.values()
    ]
    return fits(needs, budget, active)
