"""What a job needs of its device, and how much of it can stay there, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.core.plan import Resident, Spilled, Technique, kept_shards, kept_weights
from shoal.core.spec import JobMeasure, Place, ShardSpec
from shoal.core.units import Bytes
from shoal.memory.layout import TrialLayout, arena, lenders
from shoal.program.check import check
from shoal.program.costs import JobCosts
from shoal.program.footprint import Footprint
from shoal.program.ir import Program, kept
from shoal.spill import generate
from shoal.spill.generate import kept_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a study asks of every job's step."""

    micro_batches: int
    clip: bool
    technique: Technique | None  # forced
    prefers: Place  # where the optimizer steps when both places move the same bytes
    place: Place | None = None  # where trials that go on stepped before
    mixes: bool = True  # may some shards step on the device and others on the host?


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of a job on its device: between units, on top inside one, and at the peak.

    ``moved`` are those that cross its links in a step, both ways.
    """

    held: Bytes
    unit: Bytes
    peak: Bytes
    moved: Bytes

    @property
    def total(self) -> Bytes:
        """What is reserved: a unit may come at any moment."""
        return Bytes(self.held + self.unit)


def programs(
    shards: int, technique: Technique, request: Request, lent: tuple[int, ...] = ()
) -> tuple[Program, ...]:
    """The programs a job runs: a step, and an evaluation. ``lent``: see ``spilled_step``."""
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
        keep=kept_shards(technique),
        weights=kept_weights(technique),
        lent=lent,
        order=technique.order or "micro",
    )
    evaluation = generate.evaluation(
        shards,
        spilled=True,
        lookahead=technique.lookahead,
        keep=kept_shards(technique),
        weights=kept_weights(technique),
    )
    return step, evaluation


def footprints(
    shards: Sequence[ShardSpec],
    batch: Bytes,
    technique: Technique,
    request: Request,
    valid_scale: float = 1.0,
    lent: tuple[int, ...] = (),
) -> list[Footprint]:
    """What each program of a job needs; proves on the way that the programs are sound."""
    here = kept(kept_shards(technique), kept_weights(technique))
    step, evaluation = programs(len(shards), technique, request, lent)
    training = {0: JobCosts(shards=tuple(shards), batch_bytes=batch)}
    scale = 1.0 if isinstance(technique, Resident) else valid_scale  # that one was measured
    wide = tuple(_widened(shard, scale) for shard in shards)
    validation = {0: JobCosts(shards=wide, batch_bytes=Bytes(round(batch * valid_scale)))}
    return [
        check(step, training, start=here, end=here),
        check(evaluation, validation, start=here, end=here),
    ]


def _widened(shard: ShardSpec, scale: float) -> ShardSpec:
    """A shard for a batch ``scale`` times as large."""
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
    """The bytes of a job; its arena as ``layout`` makes it when that is known."""
    lent = lenders(layout) if layout is not None else ()
    prints = footprints(shards, measure.batch_bytes, technique, request, measure.valid_scale, lent)
    region = max(p.arena_bytes for p in prints)
    if layout is not None:
        clip, accumulate = request.clip, request.micro_batches
        region = Bytes(arena(layout, technique, clip=clip, accumulate=accumulate).num_bytes)
    held = max(p.held_bytes - p.arena_bytes for p in prints)
    peak = max(p.peak_bytes - p.arena_bytes for p in prints)
    return Need(
        held=Bytes(region + held + measure.buffer_bytes),
        unit=Bytes(max(p.unit_bytes for p in prints)),
        peak=Bytes(region + max(peak, held) + measure.buffer_bytes),
        moved=Bytes(prints[0].up_bytes + prints[0].down_bytes),
    )


def fits(needs: Sequence[Need], budget: Bytes, active: int) -> bool:
    """Whether any ``active`` of these jobs can share a device of ``budget`` bytes."""
    held = sorted((n.held for n in needs), reverse=True)[:active]
    held += held[-1:] * (active - len(held))  # several trials of one shape
    return sum(held) + max(n.unit for n in needs) <= budget


def keep_most(
    measure: JobMeasure,
    shards: Sequence[ShardSpec],
    technique: Spilled,
    request: Request,
    budget: Bytes,
    active: int,
    layout: TrialLayout | None = None,
) -> tuple[Spilled, Need] | None:
    """The technique with as much kept as fits, or what it names; None if it does not fit.

    Shards that borrow parameters are not kept: their copy goes stale when the lender steps.
    """
    borrowers = [s.index for s in shards if s.parameter_bytes > s.owned_bytes]
    able = [s.index for s in shards if s.index not in borrowers]

    def tried(step: int) -> tuple[Spilled, Need] | None:
        """With the first ``step`` of all there is to keep: parameters first, then state."""
        resolved = replace(technique, shards=len(shards))
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
    few, many = 0, len(able) * (2 if technique.optimizer == "device" else 1)
    if few < many > len(able) and (found := tried(len(able))):  # slots are smaller from here on
        best, few = found, len(able)
    while few < many:  # at least few fit, more than many do not
        middle = (few + many + 1) // 2
        found = tried(middle)
        if found is None:
            many = middle - 1
        else:
            best, few = found, middle
    return best


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
    if technique.keep is not None:
        return technique, base.moved
    borrowers = [s.index for s in shards if s.parameter_bytes > s.owned_bytes]
    able = [s for s in shards if s.index not in borrowers]
    count = len(shards)
    if not able or (technique.optimizer == "host" and not request.mixes):
        return replace(technique, keep=()), base.moved
    room = (budget - base.unit) // active - base.held
    held = 1 if request.clip or request.micro_batches > 1 else 0  # gradients wait for the step
    params = sum(s.parameter_bytes for s in able) / len(able)
    rest = sum(s.state_bytes + held * s.gradient_bytes for s in able) / len(able)
    if technique.optimizer == "host":
        whole = kept_of(count, _so_many(room, params + rest, len(able)), borrowers)
        share = len(whole) / count
        return replace(technique, keep=whole), Bytes(round(base.moved * (1 - share)))
    some = kept_of(count, _so_many(room, params, len(able)), borrowers)
    whole = ()
    if len(some) == len(able):
        slots = min(1 + (technique.lookahead or 0), count)
        smaller = slots * max(s.parameter_bytes for s in shards) * (len(able) == count)
        left = room - params * len(able) + smaller
        whole = kept_of(count, _so_many(left, rest, len(able)), borrowers)
    weights = tuple(s for s in some if s not in whole)
    moving = base.moved / count
    states = 2 * sum(s.state_bytes for s in able) / len(able)
    moved = moving * (count - len(some)) + min(moving, states) * len(weights)
    return replace(technique, keep=whole, keep_weights=weights), Bytes(round(moved))


def _so_many(room: float, each: float, most: int) -> int:
    return max(0, min(most, int(room // each) if each else most))
