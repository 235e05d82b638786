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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from shoal.core.errors import PlanError
from shoal.core.plan import (
    Job,
    Spilled,
    Technique,
    as_they_travel,
    kept_shards,
    travels_narrow,
)
from shoal.core.spec import (
    NO_BYTES,
    JobMeasure,
    LayerMeasure,
    Narrow,
    Order,
    Place,
    Scalar,
    ShardSpec,
    TrialSpec,
)
from shoal.core.units import Bytes, Seconds, format_bytes
from shoal.memory.layout import TrialLayout
from shoal.partition.cut import cut, shard_cost
from shoal.planner.keep import ALIKE, guess_most, guess_saves, keep_most, turn_most
from shoal.planner.need import Need, Request, fits, need, waiting_bytes
from shoal.planner.price import Speeds, price
from shoal.spill.generate import route_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A technique with its cuts, before its shards are measured.

    ``cuts`` are the first layers of the second and later shards.
    """

    technique: Spilled
    cuts: tuple[int, ...]
    moved_bytes: Bytes
    active: int
    fits: bool = True  # on paper; False where the number of shards was asked for all the same


def choices(
    measure: JobMeasure,
    budget: Bytes,
    actives: Sequence[int],
    request: Request,
    speeds: Speeds,
) -> Iterator[Choice]:
    """Spilled choices that should fit, for each number of trials at a time; the cheapest first."""
    paper = _Paper(measure, request)

    def found(places: Iterable[Place]) -> Iterator[Choice]:
        priced: list[tuple[Seconds, Choice]] = []
        for place, active in itertools.product(places, actives):
            for technique in _settings(request, place):
                fewest = next(paper.by_shards(technique, budget, active), None)
                if fewest is not None:
                    best = paper.best_count(fewest, budget)
                    priced.append((paper.step_s(best, speeds, budget), best))
        for rank, choice in enumerate(_cheapest_first(priced, request, paper, budget)):
            if not rank and (better := paper.refined(choice, budget)) != choice:
                yield better
            yield choice
            yield from paper.finer(choice, budget)

    first, last = _boundary_places(measure, budget, request)
    yield from found(first)
    yield from found(last)


def _cheapest_first(
    found: Sequence[tuple[Seconds, Choice]], request: Request, paper: _Paper, budget: Bytes
) -> list[Choice]:
    """By the seconds of a step, and where those are about the least by the bytes that move.

    Of the first of these the bytes are worked out, not guessed.
    """

    def least_bytes(choice: Choice) -> tuple[float, bool]:
        return choice.moved_bytes, choice.technique.optimizer != request.prefers

    least = min((step_s for step_s, _ in found), default=0.0)
    alike = [choice for step_s, choice in found if step_s <= ALIKE * least]
    alike.sort(key=least_bytes)
    if len(alike) > 1:
        known = [paper.worked_out(choice, budget) for choice in alike[:WORKED_OUT]]
        alike[:WORKED_OUT] = sorted(known, key=least_bytes)
    dearer = sorted((one for one in found if one[0] > ALIKE * least), key=lambda one: one[0])
    all_ = alike + [choice for _, choice in dearer]
    return sorted(all_, key=lambda choice: not choice.fits)


WORKED_OUT = 3
"""Of so many choices that cost the same, the bytes that move are worked out and not guessed."""
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
                yield Choice(
                    technique=open_, cuts=cuts, moved_bytes=Bytes(0), active=active, fits=False
                )

    def best_count(self, fewest: Choice, budget: Bytes) -> Choice:
        """The choice with the number of shards that moves clearly less than fewer shards do."""
        best = fewest
        if self._counts_forced:
            return best
        for count in self._counts(len(fewest.cuts) + 1):
            technique = replace(fewest.technique, shards=count)
            for choice in self.by_shards(technique, budget, fewest.active):
                if choice.moved_bytes < LESS * best.moved_bytes:
                    best = choice
        return best

    def _counts(self, least: int) -> list[int]:
        """Numbers of shards to compare with ``least``."""
        most = len(self._measure.layers)
        return sorted({min(most, least * times // 2) for times in (3, 4, 6, 8, 12)} | {most})

    def refined(self, choice: Choice, budget: Bytes) -> Choice:
        """The same settings with the number of shards that moves the fewest bytes.

        Worked out, not guessed: whole shards stay or travel, and a few more or less of them may
        leave a gap or fill it.
        """
        if self._counts_forced or choice.technique.keep is not None:
            return choice
        open_, active = replace(choice.technique, shards=None), choice.active
        first = next(self.by_shards(open_, budget, active), choice)
        least = len(first.cuts) + 1
        best, moved = choice, self._moved(choice, budget)
        for count in [least, least + 1, *self._counts(least)]:
            for other in self.by_shards(replace(open_, shards=count), budget, active):
                if (found := self._moved(other, budget)) < LESS * moved:
                    best, moved = other, found
        return best

    def worked_out(self, choice: Choice, budget: Bytes) -> Choice:
        """The choice with the bytes that move, as a program has them, if it fits."""
        moved = self._moved(choice, budget)
        return choice if moved == inf else replace(choice, moved_bytes=Bytes(int(moved)))

    def _moved(self, choice: Choice, budget: Bytes) -> float:
        """Bytes a step with as much kept as fits."""
        shards = self._of(choice.cuts)
        technique = replace(choice.technique, keep_activations=())  # they may be impossible ones
        request, active = self._request, choice.active
        kept = keep_most(self._measure, shards, technique, request, budget, active)
        if kept is None:
            return inf
        return turn_most(self._measure, shards, kept, technique, request, budget, active)[1].moved

    def step_s(self, choice: Choice, speeds: Speeds, budget: Bytes) -> Seconds:
        """The price of a step, with as much kept as there should be room for."""
        shards, open_, active = self._of(choice.cuts), choice.technique, choice.active
        base = self._need(choice.cuts, open_)
        technique, _ = guess_most(shards, open_, base, self._request, budget, active)
        technique = guess_saves(shards, technique, base, self._request, budget, active)
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
        shards = as_they_travel(self._of(cuts), technique)
        with_state = technique.optimizer == "device"
        if not technique.keep and not technique.keep_weights:
            slot = max(s.parameter_bytes + with_state * s.state_bytes for s in shards)
            slots = min(1 + (technique.lookahead or 0), len(shards)) * slot
            batch = self._measure.batch_bytes
            held = slots + _least_outside(shards, batch, technique, self._request)
            peak = max(held, slots + _least_inside(shards, batch, technique))
            if (active - 1) * held + peak > budget:
                return None
        return self._need(cuts, technique)

    def _need(self, cuts: tuple[int, ...], technique: Spilled) -> Need:
        least = replace(
            technique,
            keep=technique.keep or (),
            keep_turn=technique.keep_turn or 0,
            keep_activations=(),
        )
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


def _least_outside(
    shards: Sequence[ShardSpec], batch: Bytes, technique: Spilled, request: Request
) -> int:
    """What is surely held outside the slots at some moment: inputs of shards, and gradients.

    After the backward of a shard its gradients are there, and those of the one before it are
    on their way to the host, unless it stepped them.
    """
    steps_at_once = technique.optimizer == "device" and not request.clip
    in_turns = request.micro_batches > 1 and technique.order != "shard"
    all_go_down = not steps_at_once or in_turns
    waits = technique.boundaries == "host"
    most = inputs = 0
    for shard, behind in itertools.zip_longest(shards, shards[1:]):
        stored = behind.gradient_bytes if behind is not None and all_go_down else 0
        left = batch if shard.index else 0  # the first shard's backward is the last to read it
        most = max(most, left + inputs + shard.gradient_bytes + stored)
        inputs += shard.boundary_bytes - (shard.private_bytes if waits else 0)
    return max(most, batch + inputs)


def _least_inside(shards: Sequence[ShardSpec], batch: Bytes, technique: Spilled) -> int:
    """What is surely needed outside the slots inside some backward: inputs, and what runs."""
    waits = technique.boundaries == "host"
    most = inputs = 0
    for shard in shards:
        inputs += shard.boundary_bytes - (shard.private_bytes if waits else 0)
        most = max(most, batch + inputs + shard.backward_peak_bytes)
    return most


def may_go_by_shard(measure: JobMeasure, request: Request) -> bool:
    """Whether a shard can run all micro-batches of a step, where somebody asks for that.

    It is not chosen by itself: layers that share statistics, or read each other's, would see
    them in another order, and nothing that is measured shows that.
    """
    knows = measure.num_batches is not None  # how many there are, when the step begins
    return request.micro_batches > 1 and knows and not measure.draws


WORTH = 0.1
"""Inputs of layers that could wait on the host are worth a thought from this part of a budget."""


def _boundary_places(
    measure: JobMeasure, budget: Bytes, request: Request
) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Where inputs may wait: what is compared, and what is tried when nothing of that fits."""
    forced = request.technique.boundaries if isinstance(request.technique, Spilled) else None
    if forced is not None:
        return (forced,), ()
    private = sum(layer.private_bytes for layer in measure.layers)
    if private > WORTH * budget:
        return ("device", "host"), ()
    return ("device",), ("host",) if private else ()


def _settings(request: Request, boundaries: Place) -> Iterator[Spilled]:
    """The combinations that a forced technique leaves open, and what it names can be done in."""
    all_ = list(_all_settings(request, boundaries))
    yield from [technique for technique in all_ if _can_save(technique)] or all_


def _can_save(technique: Spilled) -> bool:
    named = technique.keep_activations or ()
    return not named or set(named) <= set(route_of(technique, technique.shards or 0).may_save)


def _all_settings(request: Request, boundaries: Place) -> Iterator[Spilled]:
    forced = request.technique if isinstance(request.technique, Spilled) else Spilled()
    order: Order = forced.order or "micro"
    place = _place_asked(forced, request)
    places: tuple[Place, ...] = (place,) if place else ("host", "device")
    looks = (1, 0) if forced.lookahead is None else (forced.lookahead,)
    for place, lookahead in itertools.product(places, looks):
        yield replace(
            forced,
            optimizer=place,
            lookahead=lookahead,
            order=order,
            boundaries=boundaries,
            transfer=forced.transfer or "fp32",
        )


def _place_asked(forced: Spilled, request: Request) -> Place | None:
    """Where the step shall be, if anybody says so: weights travel as bfloat16 to the host's."""
    return forced.optimizer or ("host" if forced.transfer == "bf16" else request.place)


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
    """One shard of layers ``start`` to ``stop``."""
    chosen = layers[start:stop]
    gradients = [
        layer.parameter_bytes if layer.gradient_bytes is None else layer.gradient_bytes
        for layer in chosen
    ]
    saved, peak = _in_backward(chosen, gradients)
    forward = max(layer.forward_peak_bytes for layer in chosen)
    return ShardSpec(
        index=index,
        layers=(start, stop),
        parameter_bytes=Bytes(sum(c.parameter_bytes + c.borrowed_bytes for c in chosen)),
        owned_bytes=Bytes(sum(c.parameter_bytes for c in chosen)),
        state_bytes=Bytes(sum(c.state_bytes for c in chosen)),
        gradient_bytes=Bytes(sum(gradients)),
        boundary_bytes=layers[start - 1].boundary_bytes if start else Bytes(0),
        private_bytes=_private_bytes(layers, start),
        stash_bytes=Bytes(sum(c.stash_bytes for c in chosen)),
        carry_bytes=chosen[0].carry_bytes if start else Bytes(0),
        forward_peak_bytes=Bytes(forward),
        backward_peak_bytes=Bytes(peak),
        step_peak_bytes=Bytes(0),
        saved_bytes=Bytes(saved) if stop < len(layers) else None,
        saving_peak_bytes=Bytes(peak),  # no more than that
        forward_s=Seconds(sum(c.forward_s for c in chosen)),
        backward_s=Seconds(sum(c.backward_s for c in chosen)),
        step_s=Seconds(sum(c.step_s for c in chosen)),
        narrow=_narrow_shard([layer.narrow for layer in chosen]),
    )


def _in_backward(
    layers: Sequence[LayerMeasure | Narrow], gradients: Sequence[Bytes]
) -> tuple[Bytes, Bytes]:
    """What a shard's layers save, and the peak of its backward.

    It holds what all of them saved, and on top the most that one layer needs while the gradients
    of the later ones exist already.
    """
    saved: int = sum(layer.saved_bytes for layer in layers)
    behind, peak, grads = saved, 0, 0
    for layer, gradient in zip(reversed(layers), reversed(gradients), strict=True):
        inside = layer.backward_peak_bytes - layer.saved_bytes
        peak = max(peak, behind + grads + inside)
        behind -= layer.saved_bytes
        grads += gradient
    return Bytes(saved), Bytes(peak)


def _narrow_shard(layers: Sequence[Narrow | None]) -> Narrow | None:
    chosen = [layer for layer in layers if layer is not None]
    if not chosen:
        return None
    saved, peak = _in_backward(chosen, [layer.gradient_bytes for layer in chosen])
    return Narrow(
        parameter_bytes=Bytes(sum(c.parameter_bytes for c in chosen)),
        gradient_bytes=Bytes(sum(c.gradient_bytes for c in chosen)),
        forward_peak_bytes=Bytes(max(c.forward_peak_bytes for c in chosen)),
        backward_peak_bytes=peak,
        saved_bytes=saved,
        saved_output_bytes=NO_BYTES,
        saving_peak_bytes=peak,  # no more than that
        forward_s=Seconds(sum(c.forward_s for c in chosen)),
        backward_s=Seconds(sum(c.backward_s for c in chosen)),
        step_s=Seconds(sum(c.step_s for c in chosen)),
    )


def _private_bytes(layers: Sequence[LayerMeasure], start: int) -> Bytes:
    """What of a boundary can wait on the host: what its first layer alone reads."""
    if not start:
        return Bytes(0)
    return Bytes(min(layers[start].private_bytes, layers[start - 1].boundary_bytes))


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
    shards = as_they_travel(measure.shards, technique)
    units = sum(s.backward_s + s.step_s for s in shards) * request.micro_batches
    forwards = sum(s.forward_s for s in shards[:-1]) * request.micro_batches
    return Job(
        trial=trial.number,
        hp=dict(trial.hp),
        seed=trial.seed,
        technique=technique,
        shards=shards,
        batch_bytes=measure.batch_bytes,
        buffer_bytes=measure.buffer_bytes,
        held_bytes=bytes_.held,
        unit_bytes=bytes_.unit,
        peak_bytes=bytes_.peak,
        host_bytes=Bytes(
            layout.num_bytes
            + measure.loader_bytes
            + waiting_bytes(shards, technique, request.micro_batches)
            + max(_for_a_step(shard, technique) for shard in shards)
        ),
        step_s=Seconds(max(units + forwards, 1e-6)),
        micro_batches=request.micro_batches,
        why=tuple(why),
        numerics=numerics,
    )


def _for_a_step(shard: ShardSpec, technique: Technique) -> Bytes:
    """Host memory that a step on it allocates; gradients that came as bfloat16 are cast."""
    on_host = isinstance(technique, Spilled) and technique.optimizer == "host"
    if not on_host or shard.index in kept_shards(technique):
        return NO_BYTES
    came_cast = shard.gradient_bytes < shard.owned_bytes
    cast = shard.owned_bytes if came_cast and travels_narrow(technique, shard.index) else 0
    return Bytes(shard.step_peak_bytes + cast)


def _least(measure: JobMeasure, request: Request) -> Bytes:
    """What the model needs with everything out of the way that may be, cut finely or less so."""
    layers = measure.layers
    possible = [index + 1 for index, layer in enumerate(layers[:-1]) if layer.cut_after]
    forced = request.technique if isinstance(request.technique, Spilled) else Spilled()
    totals = []
    for every in (1, 2, 3, 4, 6, 8):
        shards = predict_shards(layers, possible[every - 1 :: every])
        technique = Spilled(
            shards=len(shards),
            optimizer=_place_asked(forced, request) or "host",
            lookahead=0,
            boundaries=forced.boundaries or "host",
            transfer=forced.transfer or "fp32",
            recompute=True,
        )
        totals.append(need(measure, shards, technique, request).total)
    return min(totals)


def refuse(trial: TrialSpec, measure: JobMeasure, budget: Bytes, request: Request) -> PlanError:
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
    needed = _least(measure, request)
    training = _least(replace(measure, valid_scale=1.0), request)
    if training <= budget < needed:
        forward = max(s.forward_peak_bytes for s in singles) * measure.valid_scale
        return PlanError(
            head + f"its validation batches are {measure.valid_scale:.1f} times as large as its "
            f"training batches, and inside a forward one layer needs {format_bytes(forward)} for "
            "one. Make the validation batches smaller, or give the device more memory."
        )
    return PlanError(
        head + f"cut as finely as it can be, layer {measure.layers[worst.index].name!r} needs "
        f"{format_bytes(worst.parameter_bytes)} for its parameters and "
        f"{format_bytes(worst.backward_peak_bytes)} inside its backward; with the batch and what "
        f"shards hand on, about {format_bytes(needed)} in all. Give the device that "
        "much memory, or make the batch or the layer smaller."
    )
