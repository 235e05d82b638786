"""Which shards stay where the room counts, rather than what hides behind what.

[Note: who leaves first]
Spread evenly, the copies of shards that travel hide behind the units of those that stay
(``kept_of``). Other shards may leave more room for the same bytes.

    step on the host    the smallest travel: a small first and last layer, before a whole block; of
                        equal ones the last. Of those that stay the gradients come as late as can
                        be, when parameters that were held over the turn have gone
    on the device       where all parameters stay and nothing waits for a norm: the state of the
                        largest, of equal ones the first, whose backwards come last. It comes into
                        memory that is not there before, when the inputs of the others have gone

Whether that costs time is for a replay to say.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.core.technique import Spilled
from shoal.planner.room import Option, Room


def keep_lean(room: Room, spread: Option) -> Option | None:
    """The technique with as much kept as fits; None where that is no other than ``spread``.

    ``spread`` is what is kept where those that travel are evenly spread.
    """
    technique, request, able = room.technique, room.request, len(leaving(room))
    count, weights = len(spread[0].keep or ()), len(spread[0].keep_weights)
    waits = request.clip or request.micro_batches > 1 or technique.late_state is False
    named = technique.keep is not None or count == able
    if named or (not count if technique.optimizer == "host" else waits or count + weights < able):
        return None

    def tried(number: int) -> Option | None:
        return room.tried(with_kept(room, number))

    best = tried(count)
    if best is None:
        return next(
            (found for number in range(count - 1, 0, -1) if (found := tried(number))), None
        )
    while count < able - 1 and (found := tried(count + 1)):
        best, count = found, count + 1
    return best


def kept_lean(room: Room, count: int) -> tuple[int, ...]:
    """Which ``count`` shards stay."""
    order = leaving(room)
    return tuple(sorted(order[len(order) - count :]))


def leaving(room: Room) -> list[int]:
    """The shards that can stay, the first to leave first."""
    able = [s for s in room.shards if s.index not in room.borrowers]
    on_host = room.technique.optimizer == "host"
    sign = 1 if on_host else -1
    able.sort(key=lambda shard: (sign * shard.owned_bytes, -sign * shard.index))
    return [shard.index for shard in able]


def with_kept(room: Room, count: int) -> Spilled:
    """The technique with so many shards kept, and on the device the parameters of all others."""
    resolved, keep = room.resolved(), kept_lean(room, count)
    if room.technique.optimizer == "host":
        return replace(resolved, keep=keep)
    weights = tuple(shard for shard in sorted(leaving(room)) if shard not in keep)
    return replace(resolved, keep=keep, keep_weights=weights, late_state=True)
