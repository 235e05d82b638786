"""What of a job stays on its device: shards, parameters alone, what forwards saved.

[Note: room]
What room there is can be given to shards, whose bytes then do not move, and to activations, whose
forwards then do not run twice. At the turn from forward to backward gradients are not there yet,
which leaves room for the parameters of a few more shards, or for more activations. Copies may hide
behind computing and computing hides behind nothing; but a shard's activations can stay only where
its parameters do. So a few divisions of the room are replayed with measured times, also with more
or fewer shards whose activations go to the host (``away``), which takes a little room and time of
the links; and the cheapest is taken, of those that cost about the same the one that moves the
fewest bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from shoal.core.spec import ShardSpec
from shoal.core.technique import Spilled
from shoal.core.units import Seconds
from shoal.planner.away import with_none_recomputed, with_some_moved
from shoal.planner.lean import keep_lean
from shoal.planner.need import waiting_input_bytes
from shoal.planner.price import Speeds
from shoal.planner.room import Option, Room, most_of
from shoal.planner.spare import head_most, share_late, use_turn
from shoal.spill.generate import kept_of, route_of

ALIKE = 1.03
"""Prices that differ by no more are the same: a replay is not that good."""
SHARES = (1.0, 2 / 3, 1 / 3, 0.0)


def keep_best(room: Room, speeds: Speeds) -> Option | None:
    """The technique with the room divided as it costs the least; None if it does not fit."""

    def priced(some: Iterable[Option]) -> list[tuple[Seconds, Option]]:
        return [(room.step_s(option[0], speeds), option) for option in some]

    spread = keep_most(room)
    if spread is None:
        return None
    options, lean = _divisions(room, spread), _lean_divisions(room, spread)
    if room.technique.recompute is False:
        bare = room.tried(_with_first(room, 0))  # has the most room for what forwards saved
        options, lean = _not_recomputed(room, options), _not_recomputed(room, lean)
        options = options or _not_recomputed(room, [bare] if bare else [])
    bases = list(dict.fromkeys(_bare(t, room.technique) for t, _ in options))
    moved = priced(o for base in bases for o in with_some_moved(room, base))
    for _, some in sorted(moved, key=lambda one: one[0])[:FILLED]:
        options += [_filled(room, some, order) for order in ORDERS]
    options += [option for option in lean if option not in options]
    if len(options) < 2:
        return options[0] if options else None
    prices = priced(options)
    least = min(step_s for step_s, _ in prices)
    cheapest = [one for one in prices if one[0] <= ALIKE * least]
    return min(cheapest, key=lambda one: (one[1][1].moved, one[0]))[1]


def _divisions(room: Room, spread: Option) -> list[Option]:
    """The room for shards, for the turn and for activations, divided in a few ways."""
    technique = room.technique
    options: list[Option] = []
    none_named = not technique.keep_activations and technique.optimizer == "host"
    open_ = technique.keep is None and (technique.keep_activations is None or none_named)
    for share in SHARES if open_ else SHARES[:1]:
        kept = keep_most(room, share) if share < 1.0 else spread
        if kept is None:
            break
        options += [found for found in _filled_ways(room, kept) if found not in options]
    return options


def _lean_divisions(room: Room, spread: Option) -> list[Option]:
    """The same with other shards kept than those that leave the others evenly ``spread``."""
    kept = keep_lean(room, spread)
    bases = dict.fromkeys((kept, share_late(room, kept))) if kept else ()
    return [_filled_ways(room, base)[0] for base in bases]


def _filled_ways(room: Room, kept: Option) -> list[Option]:
    """``kept`` with the room that is left used in one order or another."""
    found: list[Option] = []
    for order in ORDERS if room.technique.optimizer == "host" else ORDERS[:1]:
        technique, need = _filled(room, kept, order)
        if not waiting_input_bytes(room.shards, technique, room.request.micro_batches):
            technique = replace(technique, boundaries="device")  # nothing would wait
        if (technique, need) not in found:
            found.append((technique, need))
    return found


def _not_recomputed(room: Room, options: Sequence[Option]) -> list[Option]:
    none = [with_none_recomputed(room, kept) for kept in options]
    return [option for option in none if option is not None]


FILLED = 2
"""Of so many that move activations it is tried what the room is good for that they leave."""


def _bare(resolved: Spilled, technique: Spilled) -> Spilled:
    """The shards that stay, and of what else room is used for only what was asked for."""
    named = technique.keep_activations or ()
    bare = replace(resolved, keep_activations=named)
    if technique.keep is None:
        bare = replace(bare, keep_head=None)
    turn, gradients = technique.keep_turn or 0, technique.keep_gradients or 0
    return replace(bare, keep_turn=turn, keep_gradients=gradients)


def _filled(
    room: Room, found: Option, order: Sequence[Callable[[Room, Option], Option]]
) -> Option:
    """With the room used that is left."""
    for most in order:
        found = most(room, found)
    return found


def _save_most(room: Room, kept: Option) -> Option:
    """``kept`` with the activations of as many shards as fit; as it is if they were named."""
    if room.technique.keep_activations is not None:
        return kept
    resolved = kept[0]
    able = savers(room.shards, resolved)

    def tried(count: int) -> Option | None:
        return room.tried(replace(resolved, keep_activations=tuple(sorted(able[:count]))))

    return most_of(tried, kept, 0, len(able))


ORDERS = ((use_turn, head_most, _save_most), (_save_most, use_turn, head_most))
"""Who is given room first."""


def savers(shards: Sequence[ShardSpec], technique: Spilled) -> list[int]:
    """Shards whose activations may stay, those first that save the most time for their bytes."""
    moved = technique.spill_activations or ()
    able = [
        s
        for s in route_of(technique, shards).may_save
        if shards[s].saved_bytes is not None and s not in moved
    ]

    def bytes_a_second(shard: int) -> float:
        spec = shards[shard]
        return (spec.saved_bytes or 0) / max(spec.forward_s, 1e-12)

    return sorted(able, key=bytes_a_second)


def keep_most(room: Room, share: float = 1.0) -> Option | None:
    """The technique with as much kept as fits, or what it names; None if it does not fit.

    Shards that borrow parameters are not kept: their copy goes stale when the lender steps.
    No more than ``share`` of all there is to keep.
    """
    technique, on_host = room.technique, room.technique.optimizer == "host"
    able = len(room.shards) - len(room.borrowers)

    def tried(step: int) -> Option | None:
        return room.tried(_with_first(room, step))

    best = tried(0)
    if best is None or technique.keep is not None or (on_host and not room.request.mixes):
        return best
    few, many = 0, int(share * able * (2 if technique.optimizer == "device" else 1))
    if few < many > able and (found := tried(able)):  # slots are smaller from here on
        best, few = found, able
    return most_of(tried, best, few, many)


def _with_first(room: Room, step: int) -> Spilled:
    """The technique with the first ``step`` of all there is to keep: parameters, then state."""
    technique, count, borrowers = room.technique, len(room.shards), room.borrowers
    resolved = room.resolved()
    if technique.keep is not None:
        return resolved
    if technique.optimizer == "device":
        able = count - len(borrowers)
        some = kept_of(count, min(step, able), borrowers)
        whole = kept_of(count, max(step - able, 0), borrowers)
        weights = tuple(sorted(set(some) - set(whole)))
        return replace(resolved, keep=whole, keep_weights=weights)
    if not room.request.mixes:
        return replace(resolved, keep=())
    return replace(resolved, keep=kept_of(count, step, borrowers))
