"""What a job needs of its device, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.core.spec import CAPTURED_LAYOUTS, NO_BYTES, JobMeasure, Place, ShardSpec, Transfer
from shoal.core.technique import (
    Captured,
    Resident,
    Spilled,
    Technique,
    as_they_travel,
    kept_heads,
    kept_shards,
    kept_weights,
)
from shoal.core.units import Bytes
from shoal.memory.layout import TrialLayout, arena, as_it_travels, lenders
from shoal.program.check import check
from shoal.program.costs import JobCosts
from shoal.program.footprint import Footprint, footprint
from shoal.program.ir import Program, kept
from shoal.spill import generate

COPIES = 3
"""Of buffers, beside one of parameters and gradients, while a captured pass is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a study asks of every job's step."""

    micro_batches: int
    clip: bool
    technique: Technique | None  # forced
    prefers: Place  # where the optimizer steps when both places move the same bytes
    place: Place | None = None  # where trials that go on stepped before
    mixes: bool = True  # may some shards step on the device and others on the host?
    varies: bool = False  # have batches been larger than what was measured?
    has_pools: bool = False  # what is captured keeps the memory of a pass to itself
    capture_bytes: Bytes = NO_BYTES  # that libraries keep for the stream on which it is captured
    waiting_room: Bytes | None = (
        None  # host memory for what waits there; None: as much as it takes
    )


def place_asked(forced: Spilled, request: Request) -> Place | None:
    """Where the step shall be, if anybody says so: weights travel as bfloat16 to the host's."""
    return forced.optimizer or ("host" if forced.transfer == "bf16" else request.place)


def transfer_of(forced: Spilled, place: Place, measure: JobMeasure) -> Transfer:
    """How weights travel: to a step on the host as bfloat16, where only products read them."""
    return forced.transfer or ("bf16" if measure.narrow and place == "host" else "fp32")


def foretells(measure: JobMeasure, technique: Technique) -> bool:
    """Whether what micro-batches draw is drawn ahead: they overlap, and the model draws."""
    return measure.draws and isinstance(technique, Spilled) and technique.order == "shard"


def goes_by_batch(measure: JobMeasure, request: Request) -> bool:
    """Whether each micro-batch is a program of its own, in which nothing waits over the turn.

    Nobody knows when a step begins how many there will be.
    """
    return request.micro_batches > 1 and measure.num_batches is None


def sweeps(technique: Spilled, request: Request) -> int:
    """How often a step goes through the shards: for each micro-batch, or once for all of them."""
    return 1 if technique.order == "shard" else request.micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of a job on its device: between units, on top of that for one, and at the peak.

    ``moved`` are those that cross its links in a step, both ways.
    """

    held: Bytes
    unit: Bytes
    peak: Bytes
    moved: Bytes

    @property
    def total(self) -> Bytes:
        """What is reserved."""
        return Bytes(self.held + self.unit)

    @property
    def most(self) -> Bytes:
        """What is reserved, or the peak where that is more."""
        return max(self.total, self.peak)


def programs(
    shards: Sequence[ShardSpec], technique: Technique, request: Request, lent: tuple[int, ...] = ()
) -> tuple[Program, ...]:
    """The programs a job runs: a step, and an evaluation. ``lent``: see ``spilled_step``."""
    if not isinstance(technique, Spilled):
        step = generate.resident_step(micro_batches=request.micro_batches, clip=request.clip)
        return step, generate.resident_evaluation()
    route = generate.route_of(technique, shards, lent)
    return route.step(request.micro_batches, request.clip), route.evaluation()


def waiting_bytes(shards: Sequence[ShardSpec], technique: Technique, micro_batches: int) -> Bytes:
    """Host memory for what waits there between forward and backward: inputs, and saved tensors."""
    if not isinstance(technique, Spilled):
        return Bytes(0)
    inputs = waiting_input_bytes(shards, technique, micro_batches)
    return Bytes(inputs + moved_saved_bytes(shards, technique))


def waiting_input_bytes(
    shards: Sequence[ShardSpec], technique: Spilled, micro_batches: int
) -> Bytes:
    """Of that the inputs of shards."""
    at_once = micro_batches if technique.order == "shard" else 1
    away = generate.route_of(technique, shards).away
    return Bytes(at_once * sum(shards[shard].private_bytes for shard in away))


def moved_saved_bytes(shards: Sequence[ShardSpec], technique: Spilled) -> Bytes:
    """What goes to the host in a micro-batch of what forwards saved."""
    moving = as_they_travel(shards, technique)
    return Bytes(sum(moving[s].movable_bytes or 0 for s in technique.spill_activations or ()))


def footprints(
    shards: Sequence[ShardSpec],
    batch: Bytes,
    technique: Technique,
    request: Request,
    valid_scale: float = 1.0,
    lent: tuple[int, ...] = (),
    *,
    proves: bool = True,
    records: bool = False,
) -> list[Footprint]:
    """What each program of a job needs; if it ``proves``, they are proved to be sound.

    If it ``records``, forwards of a training batch too, which run as an evaluation's.
    """
    here = kept(kept_shards(technique), kept_weights(technique), kept_heads(technique))
    step, evaluation = programs(shards, technique, request, lent)
    shards = as_they_travel(shards, technique)
    training = {0: JobCosts(shards=shards, batch_bytes=batch)}
    scale = 1.0 if isinstance(technique, Resident) else valid_scale  # that one was measured
    wide = tuple(_widened(shard, scale) for shard in shards)
    validation = {0: JobCosts(shards=wide, batch_bytes=Bytes(round(batch * valid_scale)))}
    all_ = [(step, training), (evaluation, validation)]
    if records:
        all_.append((evaluation, training))
    if not proves:
        return [footprint(one.devices[0], costs, start=here) for one, costs in all_]
    return [check(one, costs, start=here, end=here) for one, costs in all_]


def _widened(shard: ShardSpec, scale: float) -> ShardSpec:
    """A shard for a batch ``scale`` times as large."""
    return replace(
        shard,
        boundary_bytes=Bytes(round(shard.boundary_bytes * scale)),
        private_bytes=Bytes(int(shard.private_bytes * scale)),
        forward_peak_bytes=Bytes(round(shard.forward_peak_bytes * scale)),
    )


def need(
    measure: JobMeasure,
    shards: Sequence[ShardSpec],
    technique: Technique,
    request: Request,
    layout: TrialLayout | None = None,
    *,
    proves: bool = True,
) -> Need:
    """The bytes of a job; its arena as ``layout`` makes it when that is known.

    What is one of many on paper is not proved: the job that is made of one is.
    """
    if layout is not None:
        sums = request.micro_batches > 1
        layout = as_it_travels(layout, technique, measure.narrow, sums=sums)
    lent = lenders(layout) if layout is not None else ()
    args = (shards, measure.batch_bytes, technique, request, measure.valid_scale, lent)
    ahead = foretells(measure, technique)
    prints = footprints(*args, proves=proves, records=ahead)
    region = max(p.arena_bytes for p in prints)
    if layout is not None:
        clip, accumulate = request.clip, request.micro_batches
        region = Bytes(arena(layout, technique, clip=clip, accumulate=accumulate).num_bytes)
    held = max(p.held_bytes - p.arena_bytes for p in prints)
    peak = max(p.peak_bytes - p.arena_bytes for p in prints)
    if ahead:  # gradients of the step before may still be on their way
        peak = max(peak, held + measure.draw_bytes)
    # The largest unit may come when little is held. Of batches that vary little is sure.
    unit = max(p.unit_bytes for p in prints) if request.varies else max(peak - held, 0)
    if isinstance(technique, Captured):
        pool = CAPTURED_LAYOUTS * unit if request.has_pools else 0
        more = sum(shard.gradient_bytes + shard.owned_bytes for shard in shards)
        more += COPIES * measure.buffer_bytes
        pool += request.capture_bytes
        held, unit, peak = held + pool, unit + more, peak + pool + more
    return Need(
        held=Bytes(region + held + measure.buffer_bytes),
        unit=Bytes(unit),
        peak=Bytes(region + max(peak, held) + measure.buffer_bytes),
        moved=Bytes(prints[0].up_bytes + prints[0].down_bytes),
    )


def fits(needs: Sequence[Need], budget: Bytes, active: int) -> bool:
    """Whether any ``active`` of these jobs can share a device of ``budget`` bytes."""
    held = sorted((n.held for n in needs), reverse=True)[:active]
    held += held[-1:] * (active - len(held))  # several trials of one shape
    return sum(held) + max(n.unit for n in needs) <= budget
