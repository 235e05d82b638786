"""How one model trains on a device of a given size: resident if it fits, else in shards.

The order of preference, and what is compared:

1. resident: nothing moves. It needs parameters, state, gradients and activations at once.
2. spilled, for each (optimizer place, trials at a time, lookahead) with the fewest shards
   that fit, or with more where that moves clearly less: small shards leave more room for
   shards that stay. As many stay as there is room for. Each of these is
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
from shoal.planner.need import Need, Request, fits, guess_most, need
from shoal.planner.price import Speeds, price


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A technique with its cuts, before its shards are measured.

    ``cuts`` are the first layers of the second and later shards.
    """

    technique: Spilled
    cuts: tuple[int, ...]
    moved_bytes: Bytes
    active: int


def choices(
    measure: JobMeasure,
    budget: Bytes,
    actives: Sequence[int],
    request: Request,
    speeds: Speeds,
) -> Iterator[Choice]:
    """Spilled choices that should fit, for each number of trials at a time; the cheapest first."""
    paper = _Paper(measure, request)
    found: list[tuple[Seconds, Choice]] = []
    for active, technique in itertools.product(actives, _settings(measure, request)):
        fewest = next(paper.by_shards(technique, budget, active), None)
        if fewest is not None:
            best = paper.best_count(fewest, budget)
            found.append((paper.step_s(best, speeds, budget), best))
    for choice in _cheapest_first(found, request):
        yield choice
        yield from paper.finer(choice, budget)


ALIKE = 1.03
"""Prices that differ by no more are the same: a replay is not that good."""


def _cheapest_first(found: Sequence[tuple[Seconds, Choice]], request: Request) -> list[Choice]:
    """By the seconds of a step, and where those are about the least by the bytes that move."""
    least = min((step_s for step_s, _ in found), default=0.0)
    alike = [choice for step_s, choice in found if step_s <= ALIKE * least]
    alike.sort(key=lambda c: (c.moved_bytes, c.technique.optimizer != request.prefers))
    dearer = sorted((one for one in found if one[0] > ALIKE * least), key=lambda one: one[0])
    return alike + [choice for _, choice in dearer]


LESS = 0.95
"""More shards than necessary have to move at most so much of what the fewest move."""


class _Paper:
    """Choices of one measure, on paper: cuts, shards and bytes are worked out once."""

    def __init__(self, measure: JobMeasure, request: Request) -> None:
        self._measure, self._request = measure, request
        forced = request.technique
        self._counts_forced = isinstance(forced, Spilled) and forced.shards is not None
        self._cuts: dict[tuple[int, bool], tuple[int, ...] | None] = {}
        self._shards: dict[tuple[int, ...], tuple[ShardSpec, ...]] = {}
        self._needs: dict[tuple[tuple[int, ...], Spilled], Need] = {}

    def by_shards(self, technique: Spilled, budget: Bytes, active: int) -> Iterator[Choice]:
        """Choices with more and more shards, from the first that should fit."""
        most = len(self._measure.layers)
        for count in [technique.shards] if technique.shards else range(2, most + 1):
            cuts = self._cut(count, technique)
            if cuts is None:
                continue
            open_ = replace(technique, shards=count)
            base = self._base(cuts, open_, budget, active)
            if base is not None and fits([base], budget, active):
                moved = guess_most(self._of(cuts), open_, base, self._request, budget, active)[1]
                yield Choice(technique=open_, cuts=cuts, moved_bytes=moved, active=active)
            elif self._counts_forced:
                yield Choice(technique=open_, cuts=cuts, moved_bytes=Bytes(0), active=active)

    def best_count(self, fewest: Choice, budget: Bytes) -> Choice:
        """The choice with the number of shards that moves clearly less than fewer shards do."""
        best = fewest
        if self._counts_forced:
            return best
        least, most = len(fewest.cuts) + 1, len(self._measure.layers)
        more = {min(most, least * times // 2) for times in (3, 4, 6, 8, 12)} | {most}
        for count in sorted(more):
            technique = replace(fewest.technique, shards=count)
            for choice in self.by_shards(technique, budget, fewest.active):
                if choice.moved_bytes < LESS * best.moved_bytes:
                    best = choice
        return best

    def step_s(self, choice: Choice, speeds: Speeds, budget: Bytes) -> Seconds:
        """The price of a step, with as much kept as there should be room for."""
        shards, open_, active = self._of(choice.cuts), choice.technique, choice.active
        base = self._need(choice.cuts, open_)
        technique, _ = guess_most(shards, open_, base, self._request, budget, active)
        batch = self._measure.batch_bytes
        return price(shards, batch, technique, self._request, speeds, active).step_s

    def finer(self, choice: Choice, budget: Bytes) -> Iterator[Choice]:
        """The same settings with more shards, for when the measured shards did not fit."""
        if self._counts_forced:
            return
        open_ = replace(choice.technique, shards=None)
        for finer in self.by_shards(open_, budget, choice.active):
            if len(finer.cuts) > len(choice.cuts):
                yield finer

    def _base(
        self, cuts: tuple[int, ...], technique: Spilled, budget: Bytes, active: int
    ) -> Need | None:
        """What is needed with nothing kept but what is forced; None if it is surely too much."""
        shards = self._of(cuts)
        with_state = technique.optimizer == "device"
        if not technique.keep and not technique.keep_weights:
            slot = max(s.parameter_bytes + with_state * s.state_bytes for s in shards)
            slots = min(1 + (technique.lookahead or 0), len(shards))
            unit = max(s.backward_peak_bytes for s in shards)
            at_the_turn = sum(s.boundary_bytes for s in shards) + self._measure.batch_bytes
            if active * (slots * slot + at_the_turn) + unit > budget:
                return None
        return self._need(cuts, technique)

    def _need(self, cuts: tuple[int, ...], technique: Spilled) -> Need:
        least = replace(technique, keep=technique.keep or ())
        if (cuts, least) not in self._needs:
            found = need(self._measure, self._of(cuts), least, self._request)
            self._needs[cuts, least] = found
        return self._needs[cuts, least]

    def _of(self, cuts: tuple[int, ...]) -> tuple[ShardSpec, ...]:
        if cuts not in self._shards:
            self._shards[cuts] = predict_shards(self._measure.layers, cuts)
        return self._shards[cuts]

    def _cut(self, count: int, technique: Spilled) -> tuple[int, ...] | None:
        key = count, technique.optimizer == "device"
        if key not in self._cuts:
            self._cuts[key] = _cut(self._measure.layers, count, technique)
        return self._cuts[key]


def may_go_by_shard(measure: JobMeasure, request: Request) -> bool:
    """Whether a shard can run all micro-batches of a step, where somebody asks for that.

    It is not chosen by itself: layers that share statistics, or read each other's, would see
    them in another order, and nothing that is measured shows that.
    """
    knows = measure.num_batches is not None  # how many there are, when the step begins
    return request.micro_batches > 1 and knows and not measure.draws


def _settings(measure: JobMeasure, request: Request) -> Iterator[Spilled]:
    """The combinations that a forced technique leaves open."""
    forced = request.technique if isinstance(request.technique, Spilled) else Spilled()
    order: Order = forced.order or "micro"
    place = forced.optimizer or request.place
    places: tuple[Place, ...] = (place,) if place else ("host", "device")
    looks = (1, 0) if forced.lookahead is None else (forced.lookahead,)
    for place, lookahead in itertools.product(places, looks):
        yield replace(forced, optimizer=place, lookahead=lookahead, order=order)


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
