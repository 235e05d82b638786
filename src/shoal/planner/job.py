"""A trial with its technique as a job, and the words for one that fits nowhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shoal.core.errors import TooLarge
from shoal.core.plan import Job
from shoal.core.spec import NO_BYTES, JobMeasure, Scalar, ShardSpec, TrialSpec
from shoal.core.technique import (
    Spilled,
    Technique,
    as_they_travel,
    kept_shards,
    steps_on_host,
    travels_narrow,
)
from shoal.core.units import Bytes, Seconds, format_bytes, format_enough
from shoal.memory.layout import TrialLayout, split_bytes, with_split_masters
from shoal.planner.need import Request, foretells, need, place_asked, transfer_of, waiting_bytes
from shoal.planner.pipeline import Staged
from shoal.planner.predict import predict_shard, predict_shards
from shoal.planner.price import Speeds, run_of, work_s
from shoal.planner.replicas import Replicated
from shoal.planner.stages import legal_cuts


def make_job(
    trial: TrialSpec,
    measure: JobMeasure,
    layout: TrialLayout,
    technique: Technique,
    request: Request,
    why: Sequence[str],
    numerics: Mapping[str, Scalar],
    speeds: Speeds,
) -> Job:
    """The job of one trial whose shards have been measured."""
    bytes_ = need(measure, measure.shards, technique, request, layout)
    shards = as_they_travel(measure.shards, technique)
    waits = waiting_bytes(measure.shards, technique, request.micro_batches)
    waits = Bytes(waits + _largest_chunk(shards, layout))
    run = run_of(measure.shards, measure.batch_bytes, technique, request, speeds)
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
        waiting_bytes=waits,
        host_bytes=Bytes(
            layout.num_bytes
            + measure.loader_bytes
            + waits
            + max(_for_a_step(shard, technique) for shard in shards)
        ),
        step_s=Seconds(max(work_s(run), 1e-6)),
        micro_batches=request.micro_batches,
        why=tuple(why),
        numerics=numerics,
        foretells=foretells(measure, technique),
    )


def make_pipeline_job(
    trial: TrialSpec,
    measure: JobMeasure,
    layout: TrialLayout,
    staged: Staged,
    request: Request,
    why: Sequence[str],
    numerics: Mapping[str, Scalar],
) -> Job:
    """The job of one trial whose stages have been measured; its bytes are enough on each device.

    ``micro_batches`` are batches, as of every job; those of a technique may be pieces of them.
    """
    bytes_, on_host = staged.need, steps_on_host(staged.technique)
    largest = max(shard.step_peak_bytes for shard in staged.stages) if on_host else 0
    return Job(
        trial=trial.number,
        hp=dict(trial.hp),
        seed=trial.seed,
        technique=staged.technique,
        shards=staged.stages,
        batch_bytes=measure.batch_bytes,
        buffer_bytes=measure.buffer_bytes,
        held_bytes=bytes_.held,
        unit_bytes=bytes_.unit,
        peak_bytes=bytes_.peak,
        host_bytes=Bytes(layout.num_bytes + measure.loader_bytes + staged.gang * largest),
        step_s=staged.step_s,
        micro_batches=request.micro_batches,
        why=tuple(why),
        numerics=numerics,
    )


def make_replicated_job(
    trial: TrialSpec,
    measure: JobMeasure,
    layout: TrialLayout,
    found: Replicated,
    request: Request,
    why: Sequence[str],
    numerics: Mapping[str, Scalar],
) -> Job:
    """The job of one trial with replicas; its only shard is what one of them computes."""
    return Job(
        trial=trial.number,
        hp=dict(trial.hp),
        seed=trial.seed,
        technique=found.technique,
        shards=(found.replica.shard,),
        batch_bytes=measure.batch_bytes,
        buffer_bytes=measure.buffer_bytes,
        held_bytes=found.need.held,
        unit_bytes=found.need.unit,
        peak_bytes=found.need.peak,
        host_bytes=Bytes(layout.num_bytes + measure.loader_bytes),
        step_s=found.step_s,
        micro_batches=request.micro_batches,
        why=tuple(why),
        numerics=numerics,
    )


def with_split_master(job: Job, layout: TrialLayout, why: str) -> tuple[Job, TrialLayout]:
    """The same job, and its layout, with the float32 of what travels as bfloat16 in two parts.

    As they are where nothing does, in an array, and where somebody asked for float32.
    """
    technique = job.technique
    if not isinstance(technique, Spilled) or technique.master or job.array is not None:
        return job, layout
    split = with_split_masters(layout)
    if split == layout:
        return job, layout
    more, saved = _largest_chunk(job.shards, split), layout.num_bytes - split.num_bytes
    on_disk = bool(job.disk_bytes)
    return replace(
        job,
        technique=replace(technique, master="split"),
        why=(*job.why, why),
        waiting_bytes=Bytes(job.waiting_bytes + more),
        host_bytes=Bytes(job.host_bytes + more - (0 if on_disk else saved)),
        disk_bytes=Bytes(job.disk_bytes - saved) if on_disk else job.disk_bytes,
    ), split


def _largest_chunk(shards: Sequence[ShardSpec], layout: TrialLayout) -> int:
    """Host memory in which a step on it puts split weights together, a chunk at a time."""
    pairs = zip(shards, layout.shards, strict=True)
    return max(
        min(split_bytes(own), max(shard.step_chunks, default=own.param.num_bytes))
        for shard, own in pairs
    )


def _for_a_step(shard: ShardSpec, technique: Technique) -> Bytes:
    """Host memory that a step on it allocates; gradients that came as bfloat16 are cast."""
    on_host = isinstance(technique, Spilled) and technique.optimizer == "host"
    if not on_host or shard.index in kept_shards(technique):
        return NO_BYTES
    came_cast = shard.gradient_bytes < shard.owned_bytes
    cast = shard.owned_bytes if came_cast and travels_narrow(technique, shard.index) else 0
    return Bytes(shard.step_peak_bytes + cast)


class Least(NamedTuple):
    """The least that a model may need: on paper, and how it would be cut and train then."""

    total: Bytes
    cuts: tuple[int, ...]
    technique: Spilled


def least(measure: JobMeasure, request: Request) -> Least:
    """With everything out of the way that may be, cut finely or less so."""
    layers = measure.layers
    possible = legal_cuts(layers)
    forced = request.technique if isinstance(request.technique, Spilled) else Spilled()
    found = []
    for every in (1, 2, 3, 4, 6, 8):
        cuts = possible[every - 1 :: every]
        shards = predict_shards(layers, cuts)
        place = place_asked(forced, request) or "host"
        technique = Spilled(
            shards=len(shards),
            optimizer=place,
            lookahead=0,
            boundaries=forced.boundaries or "host",
            transfer=transfer_of(forced, place, measure),
            recompute=True,
        )
        total = need(measure, shards, technique, request).total
        found.append(Least(total, cuts, technique))
    return min(found, key=lambda one: one.total)


def refuse(
    trial: TrialSpec,
    measure: JobMeasure,
    budget: Bytes,
    request: Request,
    exact: Bytes = NO_BYTES,
) -> TooLarge:
    """Why no choice fits: the smallest shard there can be, and what it needs.

    ``exact`` is what was measured of the least there is; on paper it may be too little.
    """
    settings = ", ".join(f"{k}={v}" for k, v in trial.hp.items())
    head = f"trial {trial.number} ({settings}) does not fit a device of {format_bytes(budget)}: "
    if not measure.cuttable:
        return TooLarge(
            head
            + f"resident it needs {format_enough(measure.resident_bytes)}, and it cannot be cut: "
            + "; ".join(map(_why, measure.notes))
            + ". Give the device that much memory, make the batch smaller, or change the model "
            "so that it can be cut."
        )
    singles = [predict_shard(measure.layers, i, i, i + 1) for i in range(len(measure.layers))]
    worst = max(singles, key=lambda s: s.parameter_bytes + s.backward_peak_bytes)
    reckoned = least(measure, request).total
    needed = max(reckoned, exact)
    training = least(replace(measure, valid_scale=1.0), request).total
    if training <= budget < reckoned:
        forward = max(s.forward_peak_bytes for s in singles) * measure.valid_scale
        return TooLarge(
            head + f"its validation batches are {measure.valid_scale:.1f} times as large as its "
            f"training batches, and inside a forward one layer needs {format_bytes(forward)} for "
            "one. Make the validation batches smaller, or give the device more memory."
        )
    buffers = ""
    if measure.buffer_bytes:
        buffers = f", {format_bytes(measure.buffer_bytes)} of buffers, which stay,"
    return TooLarge(
        head + f"cut as finely as it can be, layer {measure.layers[worst.index].name!r} needs "
        f"{format_bytes(worst.parameter_bytes)} for its parameters and "
        f"{format_bytes(worst.backward_peak_bytes)} inside its backward; with the batch{buffers} "
        f"and what shards hand on, about {format_enough(needed)} in all. Give the device that "
        "much memory, or make the batch or the layer smaller."
    )


def _why(note: str) -> str:
    """The reason in a note of the pilot's, without what was said before it."""
    return note.removeprefix("the model cannot be cut into shards: ").removesuffix(".")
