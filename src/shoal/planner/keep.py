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

from shoal.core.spec import JobMeasure, ShardSpec
from shoal.core.technique import Spilled, turned_shards
from shoal.core.units import Bytes, Seconds
from shoal.memory.layout import TrialLayout
from shoal.planner.away import with_none_recomputed, with_some_moved
from shoal.planner.need import Need, Request, fits, need, waiting_bytes, waiting_input_bytes
from shoal.planner.price import Speeds, price
from shoal.planner.spare import head_most, most_of, use_turn
from shoal.spill.generate import kept_of, route_of

ALIKE = 1.03
"""Prices that differ by no more are the same: a replay is not that good."""
SHARES = (1.0, 2 / 3, 1 / 3, 0.0)


Option = tuple[Spilled, Need]


def keep_best(
    measure: JobMeasure,
    shards: Sequence[ShardSpec],
    technique: Spilled,
    request: Request,
    budget: Bytes,
    active: int,
    speeds: Speeds,
    layout: TrialLayout | None = None,
) -> Option | None:
    """The technique with the room divided as it costs the least; None if it does not fit."""
    args = (technique, request, budget, active, layout)
    options = _divisions(measure, shards, *args)
    if technique.recompute is False:
        options = [
            o for kept in options for o in with_none_recomputed(measure, shards, kept, *args)
        ]

    def priced(some: Iterable[Option]) -> list[tuple[Seconds, Option]]:
        batch = measure.batch_bytes
        return [(price(shards, batch, t, request, speeds, active).step_s, (t, n)) for t, n in some]

    bases = list(dict.fromkeys(_bare(t, technique) for t, _ in options))
    moved = priced(o for base in bases for o in with_some_moved(measure, shards, base, *args))
    for _, some in sorted(moved, key=lambda one: one[0])[:FILLED]:
        options += [_filled(measure, shards, some, order, *args) for order in ORDERS]
    if len(options) < 2:
        return options[0] if options else None
    prices = priced(options)
    least = min(step_s for step_s, _ in prices)
    cheapest = [one for one in prices if one[0] <= ALIKE * least]
    return min(cheapest, key=lambda one: (one[1][1].moved, one[0]))[1]


def _divisions(
    measure: JobMeasure,
    shards: Sequence[ShardSpec],
    technique: Spilled,
    request: Request,
    budget: Bytes,
    active: int,
    layout: TrialLayout | None,
) -> list[Option]:
    """The room for shards, for the turn and for activations, divided in a few ways."""
    args = (technique, request, budget, active, layout)
    options: list[Option] = []
    none_named = not technique.keep_activations and technique.optimizer == "host"
    open_ = technique.keep is None and (technique.keep_activations is None or none_named)
    for share in SHARES if open_ else SHARES[:1]:
        kept = keep_most(measure, shards, *args, share)
        if kept is None:
            break
        for order in ORDERS if technique.optimizer == "host" else ORDERS[:1]:
            found = _filled(measure, shards, kept, order, *args)
            if not waiting_input_bytes(shards, found[0], request.micro_batches):
                found = (replace(found[0], boundaries="device"), found[1])  # nothing would wait
            if found not in options:
                options.append(found)
    return options


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
    measure: JobMeasure,
    shards: Sequence[ShardSpec],
    found: Option,
    order: Sequence[Callable[..., Option]],
    technique: Spilled,
    request: Request,
    budget: Bytes,
    active: int,
    layout: TrialLayout | None,
) -> Option:
    """With the room used that is left."""
    for most in order:
        found = most(measure, shards, found, technique, request, budget, active, layout)
    return found


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
    moved = technique.spill_activations or ()
    able = [
        s
        for s in route_of(technique, len(shards)).may_save
        if shards[s].saved_bytes is not None and s not in moved
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
            spill_activations=technique.spill_activations or (),
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
