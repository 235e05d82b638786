"""What the room that whole shards and parameters leave is used for.

With the step on the host, the parameters of a few shards more from forward to backward. With the
step on the device, gradients that wait for it there, and then some tensors of one shard more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shoal.core.spec import ShardSpec
from shoal.core.technique import Head, Spilled, kept_weights, turnable_shards
from shoal.memory.layout import Segment, head_sizes, largest_first, lenders
from shoal.planner.lean import kept_lean, leaving, with_kept
from shoal.planner.need import goes_by_batch, sweeps
from shoal.planner.room import Option, Room, most_of
from shoal.spill.generate import kept_of


def use_turn(room: Room, kept: Option, *, fewer: bool = True) -> Option:
    """``kept`` with the room used that what stays leaves within a step, on either place."""
    at_host = kept[0].optimizer == "host"
    return _turn_most(room, kept, fewer=fewer) if at_host else _wait_most(room, kept)


def _turn_most(room: Room, kept: Option, *, fewer: bool) -> Option:
    """``kept`` with as many shards held over the turn as fit; as it is if they were asked for.

    A byte saves the same either way, and parameters alone leave smaller gaps than whole shards: a
    few of those less, or none, may move less; ``fewer`` tries that. Where one slot too many is in
    the way there is none, and all come into memory of their own. Where batches have been larger
    than what was measured, what room is left is a reserve.
    """
    technique, count = room.technique, len(room.shards)
    if technique.keep_turn is not None or room.request.varies:
        return kept
    if goes_by_batch(room.measure, room.request):
        return replace(kept[0], keep_turn=0), kept[1]
    one_visit = sweeps(kept[0], room.request) == 1

    def used(resolved: Spilled) -> Option | None:
        def tried(turned: int) -> Option | None:
            return room.tried(replace(resolved, keep_turn=turned))

        many = len(turnable_shards(resolved, count))
        is_tried = resolved is kept[0] and not resolved.keep_turn
        none = kept if is_tried else tried(0)
        most = none and most_of(tried, none, 0, many)
        if most is None or not one_visit or (most[0].keep_turn or 0) == many:
            return most
        without_slots = tried(count - len(resolved.keep or ()))
        return without_slots or most

    is_open = fewer and technique.keep is None and not kept[0].keep_activations
    others = _with_fewer(room, kept[0]) if is_open else ()
    found = [one for one in map(used, (kept[0], *others)) if one is not None]
    return min(found, key=lambda one: one[1].moved, default=kept)


FEWER = (1, 2, 3)
"""Whole shards less: as many as there are parameters in one, and its gradients that wait."""


def _with_fewer(room: Room, kept: Spilled) -> Iterator[Spilled]:
    count = len(kept.keep or ())
    is_spread = kept.keep == _spread(room, count)
    for left in sorted({max(count - less, 0) for less in FEWER} | {0}, reverse=True):
        if left < count:
            yield replace(kept, keep=(_spread if is_spread else kept_lean)(room, left))


def _spread(room: Room, count: int) -> tuple[int, ...]:
    return kept_of(len(room.shards), count, room.borrowers)


def _wait_most(room: Room, kept: Option) -> Option:
    """``kept`` with the gradients of as many shards waiting on the device as fit."""
    resolved, request = kept[0], room.request
    waits = request.clip or sweeps(resolved, request) > 1
    asked = room.technique.keep_gradients is not None or resolved.optimizer != "device"
    if asked or not waits or request.varies:
        return kept

    def tried(count: int) -> Option | None:
        return room.tried(replace(resolved, keep_gradients=count))

    return most_of(tried, kept, 0, len(room.shards) - len(resolved.keep or ()))


def head_most(room: Room, kept: Option) -> Option:
    """``kept`` with as many tensors of one shard more as fit, where those are known."""
    resolved, layout = kept[0], room.layout
    asked = room.technique.keep is not None or resolved.optimizer != "device"
    if asked or room.request.varies or layout is None or resolved.keep_head:
        return kept
    shard = _next_to_keep(room.shards, resolved, lenders(layout))
    if shard is None:
        return kept
    part = layout.shards[shard]
    sizes = head_sizes(part.state if shard in resolved.keep_weights else part.param)

    def tried(count: int) -> Option | None:
        return room.tried(replace(resolved, keep_head=(shard, sizes[count - 1])))

    return most_of(tried, kept, 0, len(sizes))


MORE = 3
"""Shards more than necessary of which some state travels."""


def share_late(room: Room, kept: Option) -> Option:
    """``kept`` with the state that travels late shared out among a few shards more.

    Of each as many bytes in whole tensors, its smallest. What is missing is met more closely by a
    few tensors of several shards than by those of one, and costs a copy each way for every shard.
    """
    layout = room.layout
    if not kept[0].late_state or layout is None or room.request.varies:
        return kept
    order, late = leaving(room), len(kept_weights(kept[0]))
    lent = lenders(layout)
    best = kept
    for count in range(late, min(late + MORE, len(order)) + 1):
        base = with_kept(room, len(order) - count)
        able = (shard for shard in order[:count] if shard not in lent)
        shares = _shares({shard: largest_first(layout.shards[shard].state) for shard in able})

        def tried(number: int, base: Spilled = base, shares: Shares = shares) -> Option | None:
            return room.tried(replace(base, keep_head=shares[number]))

        none = tried(0)
        if none is not None:
            found = most_of(tried, none, 0, len(shares) - 1)
            best = min(best, found, key=lambda one: one[1].moved)
    return best


Shares = list[tuple[Head, ...] | None]


def _shares(states: Mapping[int, Segment]) -> Shares:
    """Of each shard what stays where as many bytes travel of all: from all of it to the least."""
    tails = {part.num_bytes - size for part in states.values() for size in head_sizes(part)}
    shares: Shares = [None]
    for tail in sorted(tails, reverse=True):
        stays = {
            shard: max((n for n in head_sizes(part) if part.num_bytes - n >= tail), default=0)
            for shard, part in states.items()
        }
        heads = tuple((shard, size) for shard, size in sorted(stays.items()) if size)
        if len(heads) > 1:
            shares.append(heads)
    return shares


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
