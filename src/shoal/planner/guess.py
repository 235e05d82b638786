"""About what stays of a job on its device, and about what moves then, without a program.

Many numbers of shards are compared on paper; ``keep`` works out what the best of them need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.core.spec import ShardSpec
from shoal.core.technique import Spilled, turnable_shards, turned_shards
from shoal.core.units import Bytes
from shoal.planner.keep import savers
from shoal.planner.need import Need, sweeps, waiting_bytes
from shoal.planner.room import Room
from shoal.spill.generate import kept_of


def guess_most(room: Room, base: Need) -> tuple[Spilled, Bytes]:
    """About what ``keep_most`` will find, and about what moves then.

    ``base`` is what is needed with nothing kept. For shards of about the same size.
    """
    by_micro = replace(room.technique, order="micro")
    away = 2 * waiting_bytes(room.shards, by_micro, 1) * room.request.micro_batches
    guess = _guess_host if room.technique.optimizer == "host" else _guess_device
    found, moved = guess(room, base, Bytes(base.moved - away))
    return found, Bytes(moved + away)


def _guess_device(room: Room, base: Need, moving: Bytes) -> tuple[Spilled, Bytes]:
    """The same of what belongs to shards that can stay: ``moving`` of it moves if none does."""
    technique, shards, borrowers = room.technique, room.shards, room.borrowers
    if technique.keep is not None:
        return technique, moving
    able = [s for s in shards if s.index not in borrowers]
    count = len(shards)
    if not able:
        return replace(technique, keep=()), moving
    left = room.beside(base)
    held = _gradients_wait(room)
    params = sum(s.parameter_bytes for s in able) / len(able)
    rest = sum(s.state_bytes + held * s.gradient_bytes for s in able) / len(able)
    some = kept_of(count, _so_many(left, params, len(able)), borrowers)
    whole: tuple[int, ...] = ()
    if len(some) == len(able):
        slots = min(1 + (technique.lookahead or 0), count)
        smaller = slots * max(s.parameter_bytes for s in shards) * (len(able) == count)
        beyond = left - params * len(able) + smaller
        whole = kept_of(count, _so_many(beyond, rest, len(able)), borrowers)
    weights = tuple(s for s in some if s not in whole)
    each = moving / count
    states = 2 * sum(s.state_bytes for s in able) / len(able)
    moved = each * (count - len(some)) + min(each, states) * len(weights)
    return replace(technique, keep=whole, keep_weights=weights), Bytes(round(moved))


def _guess_host(room: Room, base: Need, moving: Bytes) -> tuple[Spilled, Bytes]:
    """The same where those that travel step on the host: whole shards stay, then the turn's."""
    technique, shards, request = room.technique, room.shards, room.request
    left: float = room.beside(base)
    held = _gradients_wait(room)
    whole: tuple[int, ...] = technique.keep or ()
    if technique.keep is None and request.mixes:
        borrowers = room.borrowers
        able = [s for s in shards if s.index not in borrowers]
        sizes = [s.parameter_bytes + s.state_bytes + held * s.gradient_bytes for s in able]
        each = sum(sizes) / max(len(able), 1)
        whole = kept_of(len(shards), _so_many(left, each, len(able)), borrowers)
        left -= each * len(whole)
        moving = Bytes(round(moving * (1 - len(whole) / len(shards))))
    if sweeps(technique, request) == 1:  # at the turn they have no gradients yet
        left += held * sum(shards[s].gradient_bytes for s in whole)
    turned = _guess_turn(shards, replace(technique, keep=whole), left)
    less = sweeps(technique, request) * sum(shards[s].parameter_bytes for s in turned)
    return replace(technique, keep=whole, keep_turn=len(turned)), Bytes(max(moving - less, 0))


def _guess_turn(shards: Sequence[ShardSpec], technique: Spilled, left: float) -> tuple[int, ...]:
    """About the shards that hold their parameters over the turn, for which there is room."""
    if technique.keep_turn is not None:
        return turned_shards(technique, len(shards))
    able = turnable_shards(technique, len(shards))
    held = 0
    for shard in reversed(able):
        left -= shards[shard].parameter_bytes
        held += left >= 0
    return able[len(able) - held :]


def guess_saves(room: Room, technique: Spilled, base: Need) -> Spilled:
    """``technique`` with about the activations for which what it keeps leaves room."""
    shards = room.shards
    if technique.keep_activations is not None:
        named = set(technique.keep_activations) & set(savers(shards, technique))
        return replace(technique, keep_activations=tuple(sorted(named)))
    waits = _gradients_wait(room)
    whole = [shards[shard] for shard in technique.keep or ()]
    taken = sum(s.parameter_bytes + s.state_bytes + waits * s.gradient_bytes for s in whole)
    turned = turned_shards(technique, len(shards))
    taken += sum(shards[s].parameter_bytes for s in (*technique.keep_weights, *turned))
    left = room.beside(base) - taken
    saves = []
    for shard in savers(shards, technique):
        left -= shards[shard].saved_bytes or 0
        if left >= 0:
            saves.append(shard)
    return replace(technique, keep_activations=tuple(sorted(saves)))


def _gradients_wait(room: Room) -> bool:
    """Whether gradients of shards that stay are there until the step."""
    return room.request.clip or sweeps(room.technique, room.request) > 1


def _so_many(left: float, each: float, most: int) -> int:
    return max(0, min(most, int(left // each) if each else most))
