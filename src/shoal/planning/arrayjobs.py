"""A trial's job in an array: the bytes of the whole array, and what the trial would take alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shoal.core.arraykeys import ALL_LAYOUTS, ARRAY_KEYS, INPUTS, LOOPED, ONE_BASE, Base
from shoal.core.plan import (
    ArrayPlace,
    ArrayRoom,
    Job,
    LoneNeed,
    room_of,
    seated,
    with_seats,
)
from shoal.core.seats import ALONE, Epoch, epochs_of, until, with_epoch
from shoal.core.spec import NO_SECONDS, PassKind, Scalar, WidthMeasure
from shoal.core.technique import as_they_travel, kept_shards
from shoal.core.units import Bytes, Seconds, counted, format_bytes, format_seconds
from shoal.planner.narrower import Narrower, told
from shoal.planner.need import waiting_input_bytes
from shoal.planning.based import BASE
from shoal.planning.spilling import SpilledArrayPlan

LOOPING = ("eager", "traced")
"""Passes in which parts of the model may run slot by slot."""
IN_SHARDS = " spilled"
"""How the name of an array's group ends that is in shards."""


def looped_of(parts: str, kind: PassKind) -> str:
    """Which of them run slot by slot in passes of a kind: of what is compiled the inputs alone."""
    if kind in LOOPING:
        return parts
    return INPUTS if kind == "compiled" and INPUTS in parts.split(", ") else ""


class ArraySlot(NamedTuple):
    """Which array, where in it, the floats of the trial's code, and what runs slot by slot.

    ``looped`` is what its key says of that (``core.arraykeys.LOOPED``).
    """

    group: str
    slot: int
    constants: str
    looped: str = ""


class Later(NamedTuple):
    """The other arrays in which a trial may go on when others were pruned.

    ``widths`` is all that is on record, ``found`` what there is of it, and for how many.
    """

    widths: tuple[Narrower, ...]
    found: tuple[tuple[WidthMeasure, int], ...] = ()
    captures: bool = True


def held_bytes(job: Job, width: int) -> Bytes:
    """What ``width`` such trials hold on the device between two steps.

    Where they have one base (``planning/based.py``) all but one of them have no frozen weights.
    """
    each = sum(s.owned_bytes + s.state_bytes for s in job.shards) + job.buffer_bytes
    batches = job.batch_bytes * job.micro_batches
    return Bytes(width * (each + batches) - (width - 1) * job.base_bytes)


def of_base(job: Job, bits: str, base: Base) -> Job:
    """A job whose key names the frozen weights that its trial shares, if it does.

    ``base`` is what its model is built with now, where that has other ``bits`` of unknown size.
    """
    if not bits:
        return job
    size = base.num_bytes if base.bits == bits else 0
    return replace(job, numerics={**job.numerics, BASE: bits}, base_bytes=Bytes(size))


def seats_taken(trials: int, devices: int, width: int) -> float:
    """How many slots of an array are taken on average, where trials are dealt to devices in turn.

    Those that no trial is for cost as much as the others.
    """
    rounds = -(-trials // (devices * width))
    return max(1.0, trials / (devices * rounds))


def in_array(
    job: Job,
    place: ArraySlot,
    found: WidthMeasure,
    why: tuple[str, ...],
    compiler: str,
    *,
    captures: bool = True,
    taken: float | None = None,
) -> Job:
    """In an array that is on its device as a whole; of its slots ``taken`` have a trial."""
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
    if "array_batches" in job.numerics:
        key |= ALL_LAYOUTS
    looped = looped_of(place.looped, found.kind)
    if looped:
        key[LOOPED] = looped
    if BASE in job.numerics:
        key, why = {**key, **ONE_BASE}, (*why, _told_of_base(job))
    own = _room(job, place, found, captures=captures, taken=taken)
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
        ),
        held_bytes=own.held_bytes,
        unit_bytes=own.unit_bytes,
        peak_bytes=own.peak_bytes,
        moves_s=NO_SECONDS,
        step_s=own.step_s,
        why=(*job.why, *why),
        numerics={**job.numerics, **key},
    )


def _told_of_base(job: Job) -> str:
    size = format_bytes(job.base_bytes)
    return f"{size} of weights that are not trained are in it once, for all of them"


def with_rooms(
    job: Job,
    alone: Job,
    place: ArraySlot,
    later: Later,
    known: Mapping[str, Scalar] | None,
) -> Job:
    """A job in an array, with the seats that its trial may get on the way.

    ``alone`` is the trial's own; ``known`` the key of one that asked for its seat: of widths and
    company it goes on to say the same. An array in shards is of one width: its trials' homes are.
    """
    assert job.array is not None
    own = room_of(job)
    others = [_room(alone, place, f, most=m, captures=later.captures) for f, m in later.found]
    array = replace(
        job.array,
        rooms=(own, *others),
        alone_most=sum(n.most for n in later.widths if n.width == ALONE),
    )
    key: dict[str, Scalar] = {
        "array_widths": told(own.width, later.widths),
        "array_company": own.group.removesuffix(IN_SHARDS),
    }
    if known is not None:
        key = {name: known[name] for name in key if name in known}
    return replace(job, array=array, numerics={**job.numerics, **key})


def _room(
    job: Job,
    place: ArraySlot,
    found: WidthMeasure,
    *,
    most: int | None = None,
    captures: bool = True,
    taken: float | None = None,
) -> ArrayRoom:
    """What a whole array takes, and who shares it."""
    group = f"{place.group}x{found.width}"
    if found.kind == "branches":
        group = f"{group} branches"
    elif found.kind == "compiled":
        group = f"{group} compiled {place.constants}"
    held = Bytes(held_bytes(job, found.width) + found.pool_bytes)
    return ArrayRoom(
        group=group,
        width=found.width,
        kind=found.kind,
        held_bytes=held,
        unit_bytes=found.unit_bytes,
        peak_bytes=Bytes(held + found.unit_bytes),
        step_s=Seconds(found.step_s / (taken or found.width)),
        most=most,
        captures=captures,
    )


def as_recorded(job: Job, before: Mapping[str, Scalar], there: Sequence[Epoch] | None) -> Job:
    """With the seats that its trial had so far, and those that it will have again.

    ``there`` are those it had when it goes on, None at its first step. Where an array that it
    needs is not there the job is as it was: its key differs, and whoever resumes it is told.
    """
    epochs = epochs_of(before)
    if len(epochs) < 2:
        return job
    kept = {name: value for name, value in before.items() if name in ARRAY_KEYS}
    there = epochs[:1] if there is None else there
    if job.array is None and there and there[-1].width == ALONE and there == epochs:
        return replace(job, numerics={**job.numerics, **kept})  # it needs none any more
    if job.array is None:
        return job
    needed = {epoch.width for epoch in epochs if epoch not in there[:-1]}
    if not needed <= {ALONE, job.array.width, *(room.width for room in job.array.rooms)}:
        return job
    return seated(job, epochs)


def elsewhere(job: Job, before: Mapping[str, Scalar], there: Sequence[Epoch], step: int) -> Job:
    """A job after ``step`` steps, where its trial is not in the seat that it had: that is told.

    ``there`` are those that it had so far, and ``before`` the key that tells of them. A job that
    has its seat, or will have it again, is as it was.
    """
    key = dict(job.numerics)
    if job.array is None and job.began is None:
        now = Epoch(step, 0, ALONE, asked=True)
        key |= {name: value for name, value in before.items() if name in ARRAY_KEYS}
    else:
        now = until(epochs_of(key), step)[-1]._replace(step=step, asked=True)
    if there[-1][1:3] == now[1:3]:
        return job
    return replace(job, numerics=with_seats(key, with_epoch(there, now)))


def in_spilled_array(
    job: Job,
    place: ArraySlot,
    plan: SpilledArrayPlan,
    width: int,
    why: tuple[str, ...],
    passes: PassKind = "eager",
    taken: float | None = None,
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
    if "array_batches" in job.numerics:
        key |= ALL_LAYOUTS
    if place.looped:
        key[LOOPED] = place.looped
    if job.numerics.get("optimizer_place") not in (None, "cpu"):
        key["optimizer_place"] = plan.technique.optimizer
    if BASE in job.numerics:
        key, why = {**key, **ONE_BASE}, (*why, _told_of_base(job))
    return replace(
        job,
        technique=plan.technique,
        foretells=False,  # micro-batches go through it one after another
        shards=as_they_travel(plan.measure.shards, plan.technique),
        array=ArrayPlace(
            group=f"{place.group}x{width}{IN_SHARDS}", slot=place.slot, width=width, alone=alone
        ),
        held_bytes=plan.need.held,
        unit_bytes=plan.need.unit,
        peak_bytes=plan.need.peak,
        waiting_bytes=rows,
        host_bytes=Bytes(job.host_bytes - job.waiting_bytes + rows),
        step_s=Seconds(plan.step_s / (taken or width)),
        moves_s=NO_SECONDS,
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
    inputs = waiting_input_bytes(plan.measure.shards, technique, 1)
    waits = (f"{format_bytes(inputs)} of inputs wait on the host between forward and backward",)
    return (
        f"{head}: the array is in {counted(count, 'shard')}{stays}; with the optimizer's step on "
        f"the {technique.optimizer} {format_bytes(plan.need.moved)} move over the link in a step",
        f"a step of the array should take {format_seconds(plan.step_s)}, with what moves",
        *(waits if inputs else ()),
        f"the trials' rows of it take {format_bytes(plan.host_bytes)} more of host memory",
    )
