"""Which shards have what their forward saved wait on the host, and do not run it again.

[Note: keep, recompute or move]
What a shard's forward saved may stay on the device, where its parameters stay too and there is
room; it may be computed again; or it may go to the host and come back. The first costs room that
shards could have, the second the device's time, the third time of the links, which is free where
they are idle, and little room: two such sets are on the device at a time. What the links have time
for depends on everything else that they carry, so some numbers of shards, spread evenly, are
replayed; shards with few bytes for their seconds (a first layer saves its batch, which is there
anyway) are always among them. Source: KARMA (SC 2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from shoal.core.spec import ShardSpec
from shoal.core.technique import Spilled, as_they_travel
from shoal.planner.need import waiting_bytes
from shoal.planner.room import Option, Room
from shoal.spill.generate import route_of

PARTS = (1.0, 3 / 4, 2 / 3, 1 / 2, 1 / 3, 1 / 4, 1 / 8, 0.0)
"""Of the shards that could, so many are tried."""
LEAST_S = 1e-3
"""Forwards that take less run again: hooks on all that they save take some 0.7 ms of Python."""
CHEAP = 1 / 4
"""Of the bytes a second that most shards take, so few are always worth it."""


FROZEN = "nothing goes backward through it: no layer up to its end is trained"
"""Why a shard has nothing to keep, or to move."""


def movable_shards(shards: Sequence[ShardSpec], technique: Spilled) -> tuple[int, ...]:
    """Shards that recompute, and whose forward could have what it saved wait on the host."""
    keeps = technique.keep_activations or ()
    return tuple(
        shard
        for shard in route_of(technique, shards).may_spill
        if shard not in keeps and can_move(shards[shard])
    )


def can_move(shard: ShardSpec) -> bool:
    """Whether what a forward saves may leave, be it nothing; the rest of it stays."""
    return shard.saved_bytes is not None and shard.movable_bytes is not None


def with_some_moved(room: Room, resolved: Spilled) -> Iterator[Option]:
    """``resolved`` with what more or fewer forwards saved on the host, as far as there is room.

    Nothing where that was asked for or forbidden, or batches grow beyond what was measured.
    """
    technique = room.technique
    named, never = technique.spill_activations is not None, technique.recompute is False
    if named or never or room.request.varies:
        return
    for moved in candidates(room.shards, resolved):
        if found := _tried(room, replace(resolved, spill_activations=moved)):
            yield found


def candidates(shards: Sequence[ShardSpec], technique: Spilled) -> list[tuple[int, ...]]:
    """Sets of shards to try, the smallest first."""
    moving = as_they_travel(shards, technique)
    able = [s for s in movable_shards(shards, technique) if moving[s].forward_s >= LEAST_S]
    dear = {s: (moving[s].movable_bytes or 0) / max(moving[s].forward_s, 1e-12) for s in able}
    usual = median(dear.values()) if able else 0.0
    cheap = [shard for shard in able if dear[shard] < CHEAP * usual or not dear[shard]]
    rest = [shard for shard in able if shard not in cheap]
    counts = sorted({round(part * len(rest)) for part in PARTS})
    sets = [tuple(sorted((*cheap, *spread(rest, count)))) for count in counts]
    return [some for some in sets if some]


def with_none_recomputed(room: Room, kept: Option) -> Option | None:
    """``kept`` where every forward that need not run again does not; None if it does not fit.

    What stays of it on the device was chosen; the rest is moved, or stays where it cannot move
    and its parameters stay too. Where these travel, as next to the turn with nothing loaded
    ahead, it has to run again.
    """
    resolved, shards = kept[0], room.shards
    stays, moves = set(resolved.keep_activations or ()), set(resolved.spill_activations or ())
    is_open = room.technique.spill_activations is None
    able = set(movable_shards(shards, resolved)) if is_open else moves
    rest = {s.index for s in shards[:-1] if not s.frozen} - stays
    may_stay = route_of(resolved, shards).may_save
    stays |= {s for s in rest - able if s in may_stay and shards[s].saved_bytes is not None}
    none = replace(
        resolved,
        keep_activations=tuple(sorted(stays)),
        spill_activations=tuple(sorted(rest & able)),
    )
    return _tried(room, none)


def _tried(room: Room, technique: Spilled) -> Option | None:
    """The technique if the device has room, and the host for what waits there."""
    most = room.request.waiting_room
    waiting = waiting_bytes(room.shards, technique, room.request.micro_batches)
    if most is not None and waiting > most:
        return None
    return room.tried(technique)


def spread(shards: Sequence[int], count: int) -> tuple[int, ...]:
    """``count`` of the shards, evenly apart, the first among them: it waits longest."""
    return tuple(shards[number * len(shards) // count] for number in range(count))
