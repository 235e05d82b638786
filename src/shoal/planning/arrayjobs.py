"""A trial's job in an array: the bytes of the whole array, and what the trial would take alone."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shoal.core.plan import ArrayPlace, Job, LoneNeed
from shoal.core.spec import PassKind, Scalar, WidthMeasure
from shoal.core.technique import as_they_travel, kept_shards
from shoal.core.units import Bytes, Seconds, counted, format_bytes, format_seconds
from shoal.planning.spilling import SpilledArrayPlan


class ArraySlot(NamedTuple):
    """Which array, where in it, and the floats of the trial's code."""

    group: str
    slot: int
    constants: str


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
) -> Job:
    """In an array that is on its device as a whole."""
    width = found.width
    held = Bytes(held_bytes(job, width) + found.pool_bytes)
    alone = LoneNeed(
        held_bytes=job.held_bytes,
        unit_bytes=job.unit_bytes,
        peak_bytes=job.peak_bytes,
        step_s=job.step_s,
    )
    group, constants = f"{place.group}x{width}", ""
    key: dict[str, Scalar] = {"array": f"slot {place.slot} of {width}"}
    if found.kind in ("traced", "branches"):
        key["array_pass"] = found.kind
    if found.kind == "branches":
        group = f"{group} branches"
    elif found.kind == "compiled":
        constants = place.constants
        key |= {"array_pass": f"compiled, {compiler}", "array_floats": constants}
        group = f"{group} compiled {constants}"
    return replace(
        job,
        array=ArrayPlace(
            group=group,
            slot=place.slot,
            width=width,
            alone=alone,
            kind=found.kind,
            captures=captures,
            constants=constants,
        ),
        held_bytes=held,
        unit_bytes=found.unit_bytes,
        peak_bytes=Bytes(held + found.unit_bytes),
        step_s=Seconds(found.step_s / width),
        why=(*job.why, *why),
        numerics={**job.numerics, **key},
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
