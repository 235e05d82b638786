"""A trial's job in an array: the bytes of the whole array, and what the trial would take alone."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shoal.core.plan import ArrayPlace, ArrayRoom, Job, LoneNeed
from shoal.core.seats import ALONE
from shoal.core.spec import PassKind, Scalar, WidthMeasure
from shoal.core.technique import as_they_travel, kept_shards
from shoal.core.units import Bytes, Seconds, counted, format_bytes, format_seconds
from shoal.planner.narrower import Narrower, told
from shoal.planning.spilling import SpilledArrayPlan


class ArraySlot(NamedTuple):
    """Which array, where in it, and the floats of the trial's code."""

    group: str
    slot: int
    constants: str


class Later(NamedTuple):
    """Where a trial may go on when others were pruned, beside its own array; ``key`` has all."""

    key: tuple[Narrower, ...]
    found: tuple[tuple[WidthMeasure, int], ...] = ()  # those that there are, and for how many
    captures: bool = True


def held_bytes(job: Job, width: int) -> Bytes:
    """What ``width`` such trials hold on the device between two steps."""
    each = sum(s.owned_bytes + s.state_bytes for s in job.shards) + job.buffer_bytes
    batches = job.batch_bytes * job.micro_batches
    return Bytes(width * (each + batches))


def in_array(
    job: Job,
    place: ArraySlot,
    found: WidthMeasure,
    why: tuple[str, ...],
    compiler: str,
    *,
    captures: bool = True,
    later: Later | None = None,
) -> Job:
    """In an array that is on its device as a whole.

    ``later``: None of a trial that keeps its seat to its end.
    """
    width = found.width
    alone = LoneNeed(
        held_bytes=job.held_bytes,
        unit_bytes=job.unit_bytes,
        peak_bytes=job.peak_bytes,
        step_s=job.step_s,
    )
    constants = place.constants if found.kind == "compiled" else ""
    key: dict[str, Scalar] = {"array": f"slot {place.slot} of {width}"}
    if found.kind in ("traced", "branches"):
        key["array_pass"] = found.kind
    if found.kind == "compiled":
        key |= {"array_pass": f"compiled, {compiler}", "array_floats": constants}
    own = _room(job, place, found, captures=captures)
    rooms: tuple[ArrayRoom, ...] = ()
    if later is not None:
        others = [_room(job, place, f, most=m, captures=later.captures) for f, m in later.found]
        rooms = (own, *others)
        if later.key:
            key["array_widths"] = told(later.key)
    return replace(
        job,
        array=ArrayPlace(
            group=own.group,
            slot=place.slot,
            width=width,
            alone=alone,
            kind=found.kind,
            captures=captures,
            constants=constants,
            rooms=rooms,
            alone_most=sum(n.most for n in later.key if n.width == ALONE) if later else 0,
        ),
        held_bytes=own.held_bytes,
        unit_bytes=own.unit_bytes,
        peak_bytes=Bytes(own.held_bytes + own.unit_bytes),
        step_s=own.step_s,
        why=(*job.why, *why),
        numerics={**job.numerics, **key},
    )


def _room(
    job: Job,
    place: ArraySlot,
    found: WidthMeasure,
    *,
    most: int | None = None,
    captures: bool = True,
) -> ArrayRoom:
    """What a whole array takes, and who shares it."""
    group = f"{place.group}x{found.width}"
    if found.kind == "branches":
        group = f"{group} branches"
    elif found.kind == "compiled":
        group = f"{group} compiled {place.constants}"
    return ArrayRoom(
        group=group,
        width=found.width,
        kind=found.kind,
        held_bytes=Bytes(held_bytes(job, found.width) + found.pool_bytes),
        unit_bytes=found.unit_bytes,
        step_s=Seconds(found.step_s / found.width),
        most=most,
        captures=captures,
    )


def in_spilled_array(
    job: Job,
    place: ArraySlot,
    plan: SpilledArrayPlan,
    width: int,
    why: tuple[str, ...],
    passes: PassKind = "eager",
) -> Job:
    """In an array in shards. Its passes are eager; a key that says traced means the same bits."""
    rows = plan.host_bytes
    alone = LoneNeed(
        held_bytes=plan.lone_need.held,
        unit_bytes=plan.lone_need.unit,
        peak_bytes=plan.lone_need.peak,
        step_s=job.step_s,
        technique=plan.lone_technique,
        shards=as_they_travel(plan.lone.shards, plan.lone_technique),
    )
    key: dict[str, Scalar] = {"array": f"slot {place.slot} of {width}"}
    if passes == "traced":
        key["array_pass"] = passes
    if job.numerics.get("optimizer_place") not in (None, "cpu"):
        key["optimizer_place"] = plan.technique.optimizer
    return replace(
        job,
        technique=plan.technique,
        foretells=False,  # micro-batches go through it one after another
        shards=as_they_travel(plan.measure.shards, plan.technique),
        array=ArrayPlace(
            group=f"{place.group}x{width} spilled", slot=place.slot, width=width, alone=alone
        ),
        held_bytes=plan.need.held,
        unit_bytes=plan.need.unit,
        peak_bytes=plan.need.peak,
        waiting_bytes=rows,
        host_bytes=Bytes(job.host_bytes - job.waiting_bytes + rows),
        step_s=Seconds(plan.step_s / width),
        why=(*job.why, *why),
        numerics={**job.numerics, **key},
    )


def why_spilled(
    plan: SpilledArrayPlan, whole: Bytes, budget: Bytes, width: int
) -> tuple[str, ...]:
    """Why an array is in shards, and what that costs."""
    technique, count = plan.technique, len(plan.measure.shards)
    head = f"as a whole {width} of them would take {format_bytes(whole)}"
    if whole > budget:
        head += f", and the device has {format_bytes(budget)}"
    kept = len(kept_shards(technique))
    stays = f", {counted(kept, 'of them stays', 'of them stay')} on the device" if kept else ""
    return (
        f"{head}: the array is in {counted(count, 'shard')}{stays}; with the optimizer's step on "
        f"the {technique.optimizer} {format_bytes(plan.need.moved)} move over the link in a step",
        f"a step of the array should take {format_seconds(plan.step_s)}, with what moves",
        f"the trials' rows of it take {format_bytes(plan.host_bytes)} more of host memory",
    )
