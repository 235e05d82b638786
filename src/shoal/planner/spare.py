"""What the room that whole shards and parameters leave is used for.

With the step on the host, the parameters of a few shards more from forward to backward. With the
step on the device, gradients that wait for it there, and then some tensors of one shard more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from shoal.core.spec import JobMeasure, ShardSpec
from shoal.core.technique import Spilled, turned_shards
from shoal.core.units import Bytes
from shoal.memory.layout import TrialLayout, head_sizes, lenders
from shoal.planner.need import Need, Request, fits, need
from shoal.spill.generate import kept_of


def turn_most(
    measure: JobMeasure,
    shards: Sequence[ShardSpec],
    kept: tuple[Spilled, Need],
    technique: Spilled,
    request: Request,
    budget: Bytes,
    active: int,
    layout: TrialLayout | None = None,
    *,
    fewer: bool = True,
) -> tuple[Spilled, Need]:
    """``kept`` with as many shards held over the turn as fit; as it is if they were asked for.

    A byte saves the same either way, and parameters alone leave smaller gaps than whole shards: a
    few of those less, or none, may move less; ``fewer`` tries that. Where batches have been larger
    than what was measured, what room is left is a reserve.
    """
    asked = technique.keep_turn is not None or kept[0].optimizer != "host"
    if asked or request.varies:
        return kept

    def used(resolved: Spilled) -> tuple[Spilled, Need] | None:
        def tried(count: int) -> tuple[Spilled, Need] | None:
            technique = replace(resolved, keep_turn=count)
            found = need(measure, shards, technique, request, layout)
            return (technique, found) if fits([found], budget, active) else None

        many = turned_shards(replace(resolved, keep_turn=len(shards)), len(shards))
        is_tried = resolved is kept[0] and not resolved.keep_turn
        none = kept if is_tried else tried(0)
        return none and most_of(tried, none, 0, len(many))

    is_open = fewer and technique.keep is None and not kept[0].keep_activations
    others = _with_fewer(kept[0], shards) if is_open else ()
    found = [one for one in map(used, (kept[0], *others)) if one is not None]
    return min(found, key=lambda one: one[1].moved, default=kept)


FEWER = (1, 2, 3)
"""Whole shards less: as many as there are parameters in one, and its gradients that wait."""


def _with_fewer(kept: Spilled, shards: Sequence[ShardSpec]) -> Iterator[Spilled]:
    count = len(kept.keep or ())
    borrowers = [s.index for s in shards if s.parameter_bytes > s.owned_bytes]
    for left in sorted({max(count - less, 0) for less in FEWER} | {0}, reverse=True):
        if left < count:
            yield replace(kept, keep=kept_of(len(shards), left, borrowers))


def wait_most(
    measure: JobMeasure,
    shards: Sequence[ShardSpec],
    kept: tuple[Spilled, Need],
    technique: Spilled,
    request: Request,
    budget: Bytes,
    active: int,
    layout: TrialLayout | None = None,
) -> tuple[Spilled, Need]:
    """``kept`` with the gradients of as many shards waiting on the device as fit."""
    resolved = kept[0]
    waits = request.clip or (request.micro_batches > 1 and resolved.order != "shard")
    asked = technique.keep_gradients is not None or resolved.optimizer != "device"
    if asked or not waits or request.varies:
        return kept

    def tried(count: int) -> tuple[Spilled, Need] | None:
        technique = replace(resolved, keep_gradients=count)
        found = need(measure, shards, technique, request, layout)
        return (technique, found) if fits([found], budget, active) else None

    return most_of(tried, kept, 0, len(shards) - len(resolved.keep or ()))


def head_most(
    measure: JobMeasure,
    shards: Sequence[ShardSpec],
    kept: tuple[Spilled, Need],
    technique: Spilled,
    request: Request,
    budget: Bytes,
    active: int,
    layout: TrialLayout | None = None,
) -> tuple[Spilled, Need]:
    """``kept`` with as many tensors of one shard more as fit, where those are known."""
    resolved = kept[0]
    asked = technique.keep is not None or resolved.optimizer != "device"
    shard = None if layout is None else _next_to_keep(shards, resolved, lenders(layout))
    if asked or request.varies or layout is None or shard is None:
        return kept
    part = layout.shards[shard]
    sizes = head_sizes(part.state if shard in resolved.keep_weights else part.param)

    def tried(count: int) -> tuple[Spilled, Need] | None:
        technique = replace(resolved, keep_head=(shard, sizes[count - 1]))
        found = need(measure, shards, technique, request, layout)
        return (technique, found) if fits([found], budget, active) else None

    return most_of(tried, kept, 0, len(sizes))


def _next_to_keep(
    shards: Sequence[ShardSpec], technique: Spilled, lent: Sequence[int]
) -> int | None:
    """The largest shard of those that would stay next; None if there is none."""
    whole = technique.keep or ()
    able = [s for s in shards if s.parameter_bytes == s.owned_bytes and s.index not in lent]
    travel = [s for s in able if s.index not in (*whole, *technique.keep_weights)]
    state = [s for s in able if s.index in technique.keep_weights]
    largest = max(travel or state, key=lambda s: s.owned_bytes, default=None)
    return None if largest is None else largest.index


def use_turn(
    measure: JobMeasure,
    shards: Sequence[ShardSpec],
    kept: tuple[Spilled, Need],
    technique: Spilled,
    request: Request,
    budget: Bytes,
    active: int,
    layout: TrialLayout | None = None,
    *,
    fewer: bool = True,
) -> tuple[Spilled, Need]:
    """``kept`` with the room used that what stays leaves within a step, on either place."""
    args = (measure, shards, kept, technique, request, budget, active, layout)
    return turn_most(*args, fewer=fewer) if kept[0].optimizer == "host" else wait_most(*args)


def most_of(
    tried: Callable[[int], tuple[Spilled, Need] | None],
    best: tuple[Spilled, Need],
    few: int,
    many: int,
) -> tuple[Spilled, Need]:
    """What is ``tried`` with as much as fits: ``few``, which is ``best``, to ``many``."""
    while few < many:
        middle = (few + many + 1) // 2
        found = tried(middle)
        if found is None:
            many = middle - 1
        else:
            best, few = found, middle
    return best
