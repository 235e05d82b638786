"""What of a job stays on its device: shards, parameters alone, what forwards saved.

[Note: room]
What room there is can be given to shards, whose bytes then do not move, and to activations, whose
forwards then do not run twice. At the turn from forward to backward gradients are not there yet,
which leaves room for the parameters of a few more shards, or for more activations. Copies may hide
behind computing and computing hides behind nothing; but a shard's activations can stay only where
its parameters do. So a few divisions of the room are replayed with measured times, and the
cheapest is taken; of those that cost about the same, the one that moves the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.core.spec import JobMeasure, ShardSpec
from shoal.core.technique import Spilled, turned_shards
from shoal.core.units import Bytes
from shoal.memory.layout import TrialLayout
from shoal.planner.need import Need, Request, fits, need, waiting_bytes
from shoal.planner.price import Speeds, price
from shoal.planner.spare import head_most, most_of, use_turn
from shoal.spill.generate import kept_of, route_of

ALIKE = 1.03
"""Prices that differ by no more are the same: a replay is not that good."""
SHARES = (1.0, 2 / 3, 1 / 3, 0.0)


def keep_best(
    measure: JobMeasure,
    shards: Sequence[ShardSpec],
    technique: Spilled,
    request: Request,
    budget: Bytes,
    active: int,
    speeds: Speeds,
    layout: TrialLayout | None = None,
) -> tuple[Spilled, Need] | None:
    """The technique with the room divided as it costs the least; None if it does not fit."""
    options: list[tuple[Spilled, Need]] = []
    none_named = not technique.keep_activations and technique.optimizer == "host"
    open_ = technique.keep is None and (technique.keep_activations is None or none_named)
    for share in SHARES if open_ else SHARES[:1]:
        kept = keep_most(measure, shards, technique, request, budget, active, layout, share)
        if kept is None:
            break
        for order in ORDERS if technique.optimizer == "host" else ORDERS[:1]:
            found = kept
            for most in order:
                found = most(measure, shards, found, technique, request, budget, active, layout)
            if not waiting_bytes(shards, found[0], request.micro_batches):
                found = (replace(found[0], boundaries="device"), found[1])  # nothing would wait
            if found not in options:
                options.append(found)
    if len(options) < 2:
        return options[0] if options else None
    batch = measure.batch_bytes
    prices = [price(shards, batch, t, request, speeds, active).step_s for t, _ in options]
    cheapest = [o for o, s in zip(options, prices, strict=True) if s <= ALIKE * min(prices)]
    return min(cheapest, key=lambda option: option[1].moved)


def _save_most(
    measure: JobMeasure,
    shards: Sequence[ShardSpec],
    kept: tuple[Spilled, Need],
    technique: Spilled,
    request: Request,
    budget: Bytes,
    active: int,
    layout: TrialLayout | None,
) -> tuple[Spilled, Need]:
    """``kept`` with the activations of as many shards as fit; as it is if they were named."""
    if technique.keep_activations is not None:
        return kept
    resolved = kept[0]
    able = _savers(shards, resolved)

    def tried(count: int) -> tuple[Spilled, Need] | None:
        technique = replace(resolved, keep_activations=tuple(sorted(able[:count])))
        found = need(measure, shards, technique, request, layout)
        return (technique, found) if fits([found], budget, active) else None

    return most_of(tried, kept, 0, len(able))


ORDERS = ((use_turn, head_most, _save_most), (_save_most, use_turn, head_most))
"""Who is given room first."""


def _savers(shards: Sequence[ShardSpec], technique: Spilled) -> list[int]:
    """Shards whose activations may stay, those first that save the most time for their bytes."""
    able = [
        s for s in route_of(technique, len(shards)).may_save if shards[s].saved_bytes is not None
    ]

    def bytes_a_second(shard: int) -> float:
        spec = shards[shard]
        return (spec.saved_bytes or 0) / max(spec.forward_s, 1e-12)

    return sorted(able, key=bytes_a_second)


def keep_most(
    measure: JobMeasure,
    shards: Sequence[ShardSpec],
    technique: Spilled,
    request: Request,
    budget: Bytes,
    active: int,
    layout: TrialLayout | None = None,
    share: float = 1.0,
) -> tuple[Spilled, Need] | None:
    """The technique with as much kept as fits, or what it names; None if it does not fit.

    Shards that borrow parameters are not kept: their copy goes stale when the lender steps.
    No more than ``share`` of all there is to keep.
    """
    borrowers = [s.index for s in shards if s.parameter_bytes > s.owned_bytes]
    able = [s.index for s in shards if s.index not in borrowers]

    def tried(step: int) -> tuple[Spilled, Need] | None:
        """With the first ``step`` of all there is to keep: parameters first, then state."""
        saves = technique.keep_activations or ()
        resolved = replace(
            technique,
            shards=len(shards),
            keep_head=technique.keep_head if technique.keep is not None else None,
            keep_activations=saves,
            keep_turn=technique.keep_turn or 0,
            keep_gradients=technique.keep_gradients or 0,
        )
        if technique.keep is None and technique.optimizer == "device":
            some = kept_of(len(shards), min(step, len(able)), borrowers)
            whole = kept_of(len(shards), max(step - len(able), 0), borrowers)
            weights = tuple(sorted(set(some) - set(whole)))
            resolved = replace(resolved, keep=whole, keep_weights=weights)
        elif technique.keep is None and not request.mixes:
            resolved = replace(resolved, keep=())
        elif technique.keep is None:
            resolved = replace(resolved, keep=kept_of(len(shards), step, borrowers))
        found = need(measure, shards, resolved, request, layout)
        return (resolved, found) if fits([found], budget, active) else None

    best, by_host = tried(0), technique.optimizer == "host"
    if best is None or technique.keep is not None or (by_host and not request.mixes):
        return best
    few, many = 0, int(share * len(able) * (2 if technique.optimizer == "device" else 1))
    if few < many > len(able) and (found := tried(len(able))):  # slots are smaller from here on
        best, few = found, len(able)
    return most_of(tried, best, few, many)


def guess_most(
    shards: Sequence[ShardSpec],
    technique: Spilled,
    base: Need,
    request: Request,
    budget: Bytes,
    active: int,
) -> tuple[Spilled, Bytes]:
    """About what ``keep_most`` will find, and about what moves then, without a program.

    ``base`` is what is needed with nothing kept. For shards of about the same size.
    """
    away = 2 * waiting_bytes(shards, replace(technique, order="micro"), 1) * request.micro_batches
    moving = Bytes(base.moved - away)
    found, moved = _guess(shards, technique, base, moving, request, budget, active)
    return found, Bytes(moved + away)


def _guess(
    shards: Sequence[ShardSpec],
    technique: Spilled,
    base: Need,
    moving: Bytes,
    request: Request,
    budget: Bytes,
    active: int,
) -> tuple[Spilled, Bytes]:
    """The same of what belongs to shards that can stay: ``moving`` of it moves if none does."""
    if technique.optimizer == "host":
        return _guess_host(shards, technique, base, moving, request, budget, active)
    if technique.keep is not None:
        return technique, moving
    borrowers = [s.index for s in shards if s.parameter_bytes > s.owned_bytes]
    able = [s for s in shards if s.index not in borrowers]
    count = len(shards)
    if not able:
        return replace(technique, keep=()), moving
    room = (budget - base.unit) // active - base.held
    held = 1 if request.clip or request.micro_batches > 1 else 0  # gradients wait for the step
    params = sum(s.parameter_bytes for s in able) / len(able)
    rest = sum(s.state_bytes + held * s.gradient_bytes for s in able) / len(able)
    some = kept_of(count, _so_many(room, params, len(able)), borrowers)
    whole: tuple[int, ...] = ()
    if len(some) == len(able):
        slots = min(1 + (technique.lookahead or 0), count)
        smaller = slots * max(s.parameter_bytes for s in shards) * (len(able) == count)
        left = room - params * len(able) + smaller
        whole = kept_of(count, _so_many(left, rest, len(able)), borrowers)
    weights = tuple(s for s in some if s not in whole)
    each = moving / count
    states = 2 * sum(s.state_bytes for s in able) / len(able)
    moved = each * (count - len(some)) + min(each, states) * len(weights)
    return replace(technique, keep=whole, keep_weights=weights), Bytes(round(moved))


def _guess_host(
    shards: Sequence[ShardSpec],
    technique: Spilled,
    base: Need,
    moving: Bytes,
    request: Request,
    budget: Bytes,
    active: int,
) -> tuple[Spilled, Bytes]:
    """The same where those that travel step on the host: whole shards stay, then the turn's."""
    left: float = (budget - base.unit) // active - base.held
    held = 1 if request.clip or request.micro_batches > 1 else 0  # gradients wait for the step
    whole: tuple[int, ...] = technique.keep or ()
    if technique.keep is None and request.mixes:
        borrowers = [s.index for s in shards if s.parameter_bytes > s.owned_bytes]
        able = [s for s in shards if s.index not in borrowers]
        sizes = [s.parameter_bytes + s.state_bytes + held * s.gradient_bytes for s in able]
        each = sum(sizes) / max(len(able), 1)
        whole = kept_of(len(shards), _so_many(left, each, len(able)), borrowers)
        left -= each * len(whole)
        moving = Bytes(round(moving * (1 - len(whole) / len(shards))))
    if request.micro_batches == 1:  # at the turn they have no gradients yet
        left += held * sum(shards[s].gradient_bytes for s in whole)
    turned = _guess_turn(shards, replace(technique, keep=whole), left)
    less = request.micro_batches * sum(shards[s].parameter_bytes for s in turned)
    return replace(technique, keep=whole, keep_turn=len(turned)), Bytes(max(moving - less, 0))


def _guess_turn(shards: Sequence[ShardSpec], technique: Spilled, room: float) -> tuple[int, ...]:
    """About the shards that hold their parameters over the turn, for which there is room."""
    if technique.keep_turn is not None:
        return turned_shards(technique, len(shards))
    able = turned_shards(replace(technique, keep_turn=len(shards)), len(shards))
    held = 0
    for shard in reversed(able):
        room -= shards[shard].parameter_bytes
        held += room >= 0
    return able[len(able) - held :]


def guess_saves(
    shards: Sequence[ShardSpec],
    technique: Spilled,
    base: Need,
    request: Request,
    budget: Bytes,
    active: int,
) -> Spilled:
    """``technique`` with about the activations for which what it keeps leaves room."""
    if technique.keep_activations is not None:
        named = set(technique.keep_activations) & set(_savers(shards, technique))
        return replace(technique, keep_activations=tuple(sorted(named)))
    waits = request.clip or request.micro_batches > 1  # gradients, for the step
    whole = [shards[shard] for shard in technique.keep or ()]
    taken = sum(s.parameter_bytes + s.state_bytes + waits * s.gradient_bytes for s in whole)
    turned = turned_shards(technique, len(shards))
    taken += sum(shards[s].parameter_bytes for s in (*technique.keep_weights, *turned))
    room = (budget - base.unit) // active - base.held - taken
    saves = []
    for shard in _savers(shards, technique):
        room -= shards[shard].saved_bytes or 0
        if room >= 0:
            saves.append(shard)
    return replace(technique, keep_activations=tuple(sorted(saves)))


def _so_many(room: float, each: float, most: int) -> int:
    return max(0, min(most, int(room // each) if each else most))
