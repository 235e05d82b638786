"""How one model trains on a device of a given size: resident if it fits, else in shards.

The order of preference, and what is compared:

1. resident: nothing moves. It needs parameters, state, gradients and activations at once.
2. spilled with the fewest shards that fit, for each (optimizer place, trials at a time,
   lookahead); among those the one that moves the fewest bytes in a step. Two trials at a
   time hide one's copies behind the other's units; alone, lookahead does.

A choice is made from layer measures, and holds only once the shards themselves have been
measured: ``fits`` decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.core.errors import PlanError
from shoal.core.plan import Job, Resident, Spilled, Technique
from shoal.core.spec import JobMeasure, LayerMeasure, Place, Scalar, ShardSpec, TrialSpec
from shoal.core.units import Bytes, Seconds, format_bytes
from shoal.memory.layout import TrialLayout, slot_parts, slot_size
from shoal.partition.cut import cut, shard_cost
from shoal.program.check import check
from shoal.program.costs import JobCosts
from shoal.program.footprint import Footprint
from shoal.program.ir import Part, Program
from shoal.spill import generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a study asks of every job's step."""

    micro_batches: int
    clip: bool
    technique: Technique | None  # forced
    prefers: Place  # where the optimizer steps when both places move the same bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A technique with its cuts, before its shards are measured.

    ``cuts`` are the first layers of the second and later shards.
    """

    technique: Spilled
    cuts: tuple[int, ...]
    moved_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of a job on its device: between units, on top inside one, and at the peak."""

    held: Bytes
    unit: Bytes
    peak: Bytes

    @property
    def total(self) -> Bytes:
        """What is reserved: a unit may come at any moment."""
        return Bytes(self.held + self.unit)


def programs(shards: int, technique: Technique, request: Request) -> tuple[Program, ...]:
    """The programs a job runs: a step, and an evaluation."""
    if isinstance(technique, Resident):
        step = generate.resident_step(micro_batches=request.micro_batches, clip=request.clip)
        return step, generate.evaluation(1, spilled=False)
    assert technique.optimizer is not None
    assert technique.lookahead is not None
    step = generate.spilled_step(
        shards,
        micro_batches=request.micro_batches,
        clip=request.clip,
        optimizer=technique.optimizer,
        lookahead=technique.lookahead,
    )
    return step, generate.evaluation(shards, spilled=True, lookahead=technique.lookahead)


def footprints(
    shards: Sequence[ShardSpec],
    batch: Bytes,
    technique: Technique,
    request: Request,
    valid_scale: float = 1.0,
) -> list[Footprint]:
    """What each program of a job needs; proves on the way that the programs are sound."""
    here = (Part.PARAM, Part.STATE) if isinstance(technique, Resident) else ()
    step, evaluation = programs(len(shards), technique, request)
    training = {0: JobCosts(shards=tuple(shards), batch_bytes=batch)}
    wide = tuple(_widened(shard, valid_scale) for shard in shards)
    validation = {0: JobCosts(shards=wide, batch_bytes=Bytes(round(batch * valid_scale)))}
    return [
        check(step, training, start=here, end=here),
        check(evaluation, validation, start=here, end=here),
    ]


def _widened(shard: ShardSpec, scale: float) -> ShardSpec:
    """A spilled shard for a batch ``scale`` times as large; a resident one was measured."""
    if shard.layers == (0, 1):
        return shard
    return replace(
        shard,
        boundary_bytes=Bytes(round(shard.boundary_bytes * scale)),
        forward_peak_bytes=Bytes(round(shard.forward_peak_bytes * scale)),
    )


def need(
    measure: JobMeasure,
    shards: Sequence[ShardSpec],
    technique: Technique,
    request: Request,
    layout: TrialLayout | None = None,
) -> Need:
    """The bytes of a job; slots as large as ``layout`` makes them when it is known."""
    scale = measure.valid_scale
    prints = footprints(shards, measure.batch_bytes, technique, request, scale)
    region = None
    if layout is not None:
        parts = slot_parts(technique, clip=request.clip, accumulate=request.micro_batches)
        slots = 1 + (technique.lookahead or 0) if isinstance(technique, Spilled) else 1
        region = slots * slot_size(layout, parts)
    return _need(prints, measure.buffer_bytes, region)


def _need(prints: Sequence[Footprint], buffers: int, region: int | None = None) -> Need:
    """What a device must have for all of a job's programs.

    ``region`` replaces the slots that the programs themselves would need.
    """
    slots = max(p.num_slots * p.slot_bytes for p in prints) if region is None else region
    held = max(p.held_bytes - p.num_slots * p.slot_bytes for p in prints)
    peak = max(p.peak_bytes - p.num_slots * p.slot_bytes for p in prints)
    return Need(
        held=Bytes(slots + held + buffers),
        unit=Bytes(max(p.unit_bytes for p in prints)),
        peak=Bytes(slots + max(peak, held) + buffers),
    )


def fits(needs: Sequence[Need], budget: Bytes, active: int) -> bool:
    """Whether any ``active`` of these jobs can share a device of ``budget`` bytes."""
    held = sorted((n.held for n in needs), reverse=True)[:active]
    held += held[-1:] * (active - len(held))  # several trials of one shape
    return sum(held) + max(n.unit for n in needs) <= budget


def choices(measure: JobMeasure, budget: Bytes, active: int, request: Request) -> Iterator[Choice]:
    """Spilled choices that should fit ``active`` at a time, the one that moves least first."""
    found = []
    for technique in _settings(measure, request):
        choice = next(_by_shards(measure, technique, budget, active, request), None)
        if choice is not None:
            found.append(choice)
    found.sort(
        key=lambda c: (
            active == 1 and c.technique.lookahead == 0,  # then nothing hides the copies
            c.moved_bytes,
            c.technique.optimizer != request.prefers,
        )
    )
    for choice in found:
        yield choice
        yield from _finer(measure, choice, budget, active, request)


def _settings(measure: JobMeasure, request: Request) -> Iterator[Spilled]:
    """The combinations that a forced technique leaves open."""
    forced = request.technique if isinstance(request.technique, Spilled) else Spilled()
    places: tuple[Place, ...] = (forced.optimizer,) if forced.optimizer else ("host", "device")
    looks = (1, 0) if forced.lookahead is None else (forced.lookahead,)
    for place in places:
        for lookahead in looks:
            yield Spilled(shards=forced.shards, optimizer=place, lookahead=lookahead)


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
        scale = measure.valid_scale
        prints = footprints(shards, measure.batch_bytes, technique, request, scale)
        bytes_ = _need(prints, measure.buffer_bytes)
        if technique.shards or fits([bytes_], budget, active):
            yield Choice(
                technique=Spilled(
                    shards=count, optimizer=technique.optimizer, lookahead=technique.lookahead
                ),
                cuts=cuts,
                moved_bytes=Bytes(prints[0].up_bytes + prints[0].down_bytes),
            )


def _finer(
    measure: JobMeasure, choice: Choice, budget: Bytes, active: int, request: Request
) -> Iterator[Choice]:
    """The same settings with more shards, for when the measured shards did not fit."""
    forced = isinstance(request.technique, Spilled) and request.technique.shards is not None
    if forced:
        return
    open_ = Spilled(optimizer=choice.technique.optimizer, lookahead=choice.technique.lookahead)
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
