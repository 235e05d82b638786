"""How one model trains on a device of a given size: resident if it fits, else in shards.

The order of preference, and what is compared:

1. resident: nothing moves. It needs parameters, state, gradients and activations at once.
2. spilled, for each (optimizer place, trials at a time, lookahead, order of the loops) with
   the fewest shards that fit, or with more where that moves clearly less: small shards leave
   more room for shards that stay. As many stay as there is room for. Each of these is
   replayed with the measured seconds, and the one whose step costs the least of the device's
   time is taken; of those that cost about the same, the one that moves the fewest bytes.

A choice is made from layer measures, and holds only once the shards themselves have been
measured: ``fits`` decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.core.errors import PlanError
from shoal.core.plan import Job, Spilled, Technique
from shoal.core.spec import (
    JobMeasure,
    LayerMeasure,
    Order,
    Place,
    Scalar,
    ShardSpec,
    TrialSpec,
)
from shoal.core.units import Bytes, Seconds, format_bytes
from shoal.memory.layout import TrialLayout
from shoal.partition.cut import cut, shard_cost
from shoal.planner.need import Request, keep_most, need
from shoal.planner.price import Price, Speeds, price


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A technique with its cuts, before its shards are measured.

    ``cuts`` are the first layers of the second and later shards.
    """

    technique: Spilled
    cuts: tuple[int, ...]
    moved_bytes: Bytes
    active: int
    price: Price | None = None  # of what is kept according to the layer measures


def choices(
    measure: JobMeasure,
    budget: Bytes,
    actives: Sequence[int],
    request: Request,
    speeds: Speeds,
) -> Iterator[Choice]:
    """Spilled choices that should fit, for each number of trials at a time; the cheapest first."""
    found = []
    for active in actives:
        for technique in _settings(measure, request):
            fewest = next(_by_shards(measure, technique, budget, active, request), None)
            if fewest is not None:
                best = _best_count(measure, fewest, budget, active, request)
                found.append(_priced(measure, best, budget, request, speeds))
    for choice in _cheapest_first(found, request):
        yield choice
        yield from _finer(measure, choice, budget, choice.active, request)


def _priced(
    measure: JobMeasure, choice: Choice, budget: Bytes, request: Request, speeds: Speeds
) -> Choice:
    shards = predict_shards(measure.layers, choice.cuts)
    kept = keep_most(measure, shards, choice.technique, request, budget, choice.active)
    technique = kept[0] if kept else replace(choice.technique, keep=choice.technique.keep or ())
    batch = measure.batch_bytes
    found = price(shards, batch, technique, request, speeds, choice.active)
    return replace(choice, price=found)


ALIKE = 1.03
"""Prices that differ by no more are the same: a replay is not that good."""


def _cheapest_first(found: Sequence[Choice], request: Request) -> list[Choice]:
    """By price, and where that is about the least by the bytes that are moved."""
    prices = {id(choice): choice.price.step_s if choice.price else 0.0 for choice in found}
    least = min(prices.values(), default=0.0)
    alike = [choice for choice in found if prices[id(choice)] <= ALIKE * least]
    alike.sort(key=lambda c: (c.moved_bytes, c.technique.optimizer != request.prefers))
    others = [choice for choice in found if prices[id(choice)] > ALIKE * least]
    return alike + sorted(others, key=lambda choice: prices[id(choice)])


LESS = 0.95
"""More shards than necessary have to move at most so much of what the fewest move."""


def _best_count(
    measure: JobMeasure, fewest: Choice, budget: Bytes, active: int, request: Request
) -> Choice:
    """The choice with the number of shards that moves clearly less than fewer shards do."""
    best, forced = fewest, request.technique
    if isinstance(forced, Spilled) and forced.shards:
        return best
    least, most = len(fewest.cuts) + 1, len(measure.layers)
    for count in sorted({min(most, least * times // 2) for times in (3, 4, 6, 8, 12)} | {most}):
        technique = replace(fewest.technique, shards=count)
        for choice in _by_shards(measure, technique, budget, active, request):
            if choice.moved_bytes < LESS * best.moved_bytes:
                best = choice
    return best


def may_go_by_shard(measure: JobMeasure, request: Request) -> bool:
    """Whether a shard can run all micro-batches of a step, with the bits of the plain loop."""
    knows = measure.num_batches is not None  # how many there are, when the step begins
    return request.micro_batches > 1 and knows and not measure.draws


def _settings(measure: JobMeasure, request: Request) -> Iterator[Spilled]:
    """The combinations that a forced technique leaves open."""
    forced = request.technique if isinstance(request.technique, Spilled) else Spilled()
    orders: tuple[Order, ...] = (forced.order,) if forced.order else ("micro",)
    if forced.order is None and may_go_by_shard(measure, request):
        orders = ("shard", "micro")
    place = forced.optimizer or request.place
    places: tuple[Place, ...] = (place,) if place else ("host", "device")
    looks = (1, 0) if forced.lookahead is None else (forced.lookahead,)
    for place, lookahead, order in itertools.product(places, looks, orders):
        yield replace(forced, optimizer=place, lookahead=lookahead, order=order)


def _by_shards(
    measure: JobMeasure, technique: Spilled, budget: Bytes, active: int, request: Request
) -> Iterator[Choice]:
    """Choices with more and more shards, from the first that should fit."""
    most = len(measure.layers)
    counts = [technique.shards] if technique.shards else range(2, most + 1)
    for count in counts:
        cuts = _cut(measure.layers, count, technique)
        if cuts is None:
            continue
        shards = predict_shards(measure.layers, cuts)
        open_ = replace(technique, shards=count)
        found = keep_most(measure, shards, open_, request, budget, active)
        if found:
            yield Choice(technique=open_, cuts=cuts, moved_bytes=found[1].moved, active=active)
        elif technique.shards:
            bytes_ = need(measure, shards, replace(open_, keep=technique.keep or ()), request)
            yield Choice(technique=open_, cuts=cuts, moved_bytes=bytes_.moved, active=active)


def _finer(
    measure: JobMeasure, choice: Choice, budget: Bytes, active: int, request: Request
) -> Iterator[Choice]:
    """The same settings with more shards, for when the measured shards did not fit."""
    forced = isinstance(request.technique, Spilled) and request.technique.shards is not None
    if forced:
        return
    open_ = replace(choice.technique, shards=None)
    for finer in _by_shards(measure, open_, budget, active, request):
        if len(finer.cuts) > len(choice.cuts):
            yield finer


def _cut(layers: Sequence[LayerMeasure], count: int, technique: Spilled) -> tuple[int, ...] | None:
    """Cuts that make the largest shard smallest; None when ``count`` shards cannot be made."""
    possible = sum(layer.cut_after for layer in layers[:-1]) + 1
    if count > possible:
        return None
    return cut(layers, count, shard_cost(layers, with_state=technique.optimizer == "device"))


def predict_shards(layers: Sequence[LayerMeasure], cuts: Sequence[int]) -> tuple[ShardSpec, ...]:
    """The shards between ``cuts``, from what their layers measured."""
    bounds = [0, *cuts, len(layers)]
    return tuple(
        predict_shard(layers, index, start, stop)
        for index, (start, stop) in enumerate(itertools.pairwise(bounds))
    )


def predict_shard(layers: Sequence[LayerMeasure], index: int, start: int, stop: int) -> ShardSpec:
    """One shard of layers ``start`` to ``stop``.

    Its backward holds what all its layers saved, and on top the most that one layer needs
    while the gradients of the later ones exist already.
    """
    chosen = layers[start:stop]
    saved = peak = grads = 0
    for layer in chosen:
        saved += layer.saved_bytes
    behind = saved
    for layer in reversed(chosen):
        inside = layer.backward_peak_bytes - layer.saved_bytes
        peak = max(peak, behind + grads + inside)
        behind -= layer.saved_bytes
        grads += layer.parameter_bytes
    forward = max(layer.forward_peak_bytes for layer in chosen)
    return ShardSpec(
        index=index,
        layers=(start, stop),
        parameter_bytes=Bytes(sum(c.parameter_bytes + c.borrowed_bytes for c in chosen)),
        owned_bytes=Bytes(grads),
        state_bytes=Bytes(sum(c.state_bytes for c in chosen)),
        gradient_bytes=Bytes(grads),
        boundary_bytes=layers[start - 1].boundary_bytes if start else Bytes(0),
        carry_bytes=chosen[0].carry_bytes if start else Bytes(0),
        forward_peak_bytes=Bytes(forward),
        backward_peak_bytes=Bytes(peak),
        step_peak_bytes=Bytes(0),
        forward_s=Seconds(sum(c.forward_s for c in chosen)),
        backward_s=Seconds(sum(c.backward_s for c in chosen)),
        step_s=Seconds(sum(c.step_s for c in chosen)),
    )


def make_job(
    trial: TrialSpec,
    measure: JobMeasure,
    layout: TrialLayout,
    technique: Technique,
    request: Request,
    why: Sequence[str],
    numerics: Mapping[str, Scalar],
) -> Job:
    """The job of one trial whose shards have been measured."""
    bytes_ = need(measure, measure.shards, technique, request, layout)
    units = sum(s.backward_s + s.step_s for s in measure.shards) * request.micro_batches
    forwards = sum(s.forward_s for s in measure.shards[:-1]) * request.micro_batches
    return Job(
        trial=trial.number,
        hp=dict(trial.hp),
        seed=trial.seed,
        technique=technique,
        shards=measure.shards,
        batch_bytes=measure.batch_bytes,
        buffer_bytes=measure.buffer_bytes,
        held_bytes=bytes_.held,
        unit_bytes=bytes_.unit,
        peak_bytes=bytes_.peak,
        host_bytes=Bytes(layout.num_bytes + measure.loader_bytes),
        step_s=Seconds(max(units + forwards, 1e-6)),
        micro_batches=request.micro_batches,
        why=tuple(why),
        numerics=numerics,
    )


def refuse(trial: TrialSpec, measure: JobMeasure, budget: Bytes) -> PlanError:
    """Why no choice fits: the smallest shard there can be, and what it needs."""
    settings = ", ".join(f"{k}={v}" for k, v in trial.hp.items())
    head = f"trial {trial.number} ({settings}) does not fit a device of {format_bytes(budget)}: "
    if not measure.cuttable:
        return PlanError(
            head
            + f"resident it needs {format_bytes(measure.resident_bytes)}, and it cannot be cut: "
            + "; ".join(measure.notes)
            + ". Give the device that much memory, make the batch smaller, or change the model "
            "so that it can be cut."
        )
    singles = [predict_shard(measure.layers, i, i, i + 1) for i in range(len(measure.layers))]
    worst = max(singles, key=lambda s: s.parameter_bytes + s.backward_peak_bytes)
    boundaries = sum(s.boundary_bytes for s in singles)
    needed = worst.parameter_bytes + worst.backward_peak_bytes + boundaries + measure.batch_bytes
    if needed <= budget and measure.valid_scale > 1:
        forward = max(s.forward_peak_bytes for s in singles) * measure.valid_scale
        return PlanError(
            head + f"its validation batches are {measure.valid_scale:.1f} times as large as its "
            f"training batches, and inside a forward one layer needs {format_bytes(forward)} for "
            "one. Make the validation batches smaller, or give the device more memory."
        )
    return PlanError(
        head + f"cut as finely as it can be, layer {measure.layers[worst.index].name!r} needs "
        f"{format_bytes(worst.parameter_bytes)} for its parameters and "
        f"{format_bytes(worst.backward_peak_bytes)} inside its backward, beside "
        f"{format_bytes(boundaries)} of boundaries: about {format_bytes(needed)} in all. Give the "
        "device that much memory, or make the batch or the layer smaller."
    )
