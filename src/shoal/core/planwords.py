"""What a plan says of its devices and of each job, for who reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.core.spec import NO_BYTES, DeviceSpec, ShardSpec
from shoal.core.technique import (
    DataParallel,
    Pipelined,
    Spilled,
    Technique,
    has_split_master,
    heads_of,
    kept_shards,
    kept_weights,
    late_shards,
    spans_of,
    turned_shards,
    waiting_gradients,
)
from shoal.core.units import counted, format_bytes, format_seconds, format_value

if TYPE_CHECKING:  # a plan is put in words by its own ``explain``
    from shoal.core.plan import ArrayPlace, Job


def memory_in_words(device: DeviceSpec) -> str:
    """What trials may have of a device is less than all where libraries keep some of it."""
    if not device.library_bytes:
        return format_bytes(device.memory)
    own = format_bytes(device.library_bytes)
    return f"of {format_bytes(device.memory)}, {own} are the libraries' own"


def job_in_words(job: Job, like: int) -> list[str]:
    """A job in full, or that it is like the first job of its shape."""
    name = _named(job)
    settings = ", ".join(f"{k}={format_value(v)}" for k, v in job.hp.items())
    lines = [f"  trial {job.trial} ({settings}; seed {job.seed}): {name}"]
    if like != job.trial:
        return [f"{lines[0]}, as trial {like}"]
    shards = job.shards
    total = {
        "parameters": sum(s.owned_bytes for s in shards),
        "gradients": sum(s.gradient_bytes for s in shards),
        "optimizer state": sum(s.state_bytes for s in shards),
        f"inputs of {_part(job.technique)}s": sum(s.boundary_bytes for s in shards),
        "buffers": job.buffer_bytes,
        "batch": job.batch_bytes,
        "workspace of kernels": max((s.workspace_bytes for s in shards), default=NO_BYTES),
    }
    if isinstance(job.technique, Spilled):
        lines += _shards(shards, job.technique)
    if isinstance(job.technique, Pipelined):
        lines += _pipeline(job, job.technique)
    if isinstance(job.technique, DataParallel):
        lines.append(f"    {_replicas(job, job.technique)}")
    lines.append("    " + ", ".join(f"{k} {format_bytes(v)}" for k, v in total.items() if v))
    where = "on the device, the whole array" if job.array else "on the device"
    if job.gang > 1:
        where = "on each device"
    lines.append(
        f"    {where}: up to {format_bytes(job.held_bytes)} held, up to "
        f"{format_bytes(job.unit_bytes)} more while it computes, "
        f"{format_bytes(job.peak_bytes)} at the peak; on the host {format_bytes(job.host_bytes)}"
        f"{f', on disk {format_bytes(job.disk_bytes)}' if job.disk_bytes else ''}; "
        f"{format_seconds(job.takes_s)} a step"
    )
    lines += [f"    - {reason}" for reason in job.why]
    lines.append("    numerics: " + ", ".join(f"{k}={v}" for k, v in job.numerics.items()))
    return lines


def _named(job: Job) -> str:
    """How a trial trains: its technique, or where in which array."""
    technique, place = type(job.technique).__name__, job.array
    if place is None:
        return technique
    way = "" if place.kind == "eager" else f", {place.kind}"
    name = f"slot {place.slot} of an array of {place.width}{way}{_rooms(place)}"
    return f"{technique}, {name}" if isinstance(job.technique, Spilled) else name


def _rooms(place: ArrayPlace) -> str:
    """Who goes on elsewhere once others were pruned."""
    parts = [f"the last {r.most} in an array of {r.width}" for r in place.rooms if r.most]
    parts += [f"the last {place.alone_most} alone"] * bool(place.alone_most)
    return f" (of its generation {', '.join(parts)})" if parts else ""


def _part(technique: Technique) -> str:
    is_cut = isinstance(technique, Pipelined) and not technique.is_spilled
    return "stage" if is_cut else "shard"


def _shards(shards: Sequence[ShardSpec], technique: Spilled) -> list[str]:
    """What stays on the device of which shards, what waits for them where, and each of them."""
    count, place = counted(len(shards), "shard"), technique.optimizer
    lines = [f"    {count}, the optimizer steps on the {place}"]
    if technique.transfer == "bf16":
        lines.append("    weights that only bf16 products read travel as bfloat16")
    if has_split_master(technique):
        lines.append("    the host keeps them as that, and what it lacks of their float32")
    if kept := kept_shards(technique):
        names = _shards_named(kept)
        stay = counted(len(kept), "of them stays", "of them stay")
        lines.append(f"    {stay} on the device between steps: {names}")
    if weights := kept_weights(technique):
        names = _shards_named(weights)
        stay = counted(len(weights), "keeps its", "keep their")
        lines.append(f"    {stay} parameters there, and the optimizer state travels: {names}")
    if late_shards(technique):
        lines.append("    that state takes memory there from its first load to a step's end")
    for shard, num_bytes in heads_of(technique).items():
        part = "state" if shard in kept_weights(technique) else "parameters"
        size = format_bytes(num_bytes)
        lines.append(f"    {size} of the {part} of shard {shard} stay there too")
    turned = [s for s in turned_shards(technique, len(shards)) if not shards[s].frozen]
    if turned:
        names = _shards_named(turned)
        stay = counted(len(turned), "more stays", "more stay")
        lines.append(f"    {stay} from forward to backward: {names}")
    if waiting := waiting_gradients(technique, len(shards)):
        names = _shards_named(waiting)
        lines.append(f"    gradients of {len(waiting)} wait there for the step: {names}")
    if saves := technique.keep_activations:
        names = _shards_named(saves)
        keep = counted(len(saves), "keeps what its", "keep what their")
        lines.append(f"    {keep} forward saved, and run it once: {names}")
    if spills := technique.spill_activations:
        names = _shards_named(spills)
        lines.append(f"    what the forward of {len(spills)} saved waits on the host: {names}")
    return [*lines, *(f"    {shard_in_words(shard)}" for shard in shards)]


def _pipeline(job: Job, technique: Pipelined) -> list[str]:
    count, micros = job.parts, technique.micro_batches or job.micro_batches
    step = f"{counted(micros, 'micro-batch', 'micro-batches')} a step"
    copies = "" if technique.width == 1 else f"{technique.width} copies of "
    if micros != job.micro_batches:
        step += f", {micros // job.micro_batches} of each batch"
    saves = "forwards are run again in the backward"
    if not technique.recompute:
        saves = "what forwards save waits for the backward"
    lag = ""
    if technique.lag:
        lag = f", {counted(technique.lag, 'micro-batch', 'micro-batches')} further ahead"
    weights = ", weights one step old" if technique.is_stale else ""
    guess = ", with a guess of the newer ones" if technique.predict else ""
    parts = [f"    {shard_in_words(shard, 'stage')}" for shard in job.shards]
    if technique.is_spilled:
        saves, parts = _spilled(technique), _stages(job, technique)
    how = f"schedule {technique.known_schedule}{lag}{weights}{guess}"
    return [
        f"    {copies}{counted(count, 'stage')}, a device each, {how}; {step}; {saves}",
        *parts,
    ]


def _spilled(technique: Pipelined) -> str:
    where = "wait on the device" if technique.keep_gradients else "go to the host"
    said = f"the stages are spilled: {technique.shards} shards, the optimizer steps on the "
    said += f"{technique.optimizer}, shards are loaded {technique.lookahead} ahead"
    return f"{said}, gradients {where} between micro-batches"


def _stages(job: Job, technique: Pipelined) -> list[str]:
    lines, kept = [], set(kept_shards(technique))
    for stage, (first, stop) in enumerate(spans_of(technique, job.shards)):
        stay = ", ".join(str(shard) for shard in range(first, stop) if shard in kept) or "none"
        lines.append(
            f"    stage {stage}: {counted(stop - first, 'shard')}; between steps stay: {stay}"
        )
        lines += [f"      {shard_in_words(shard)}" for shard in job.shards[first:stop]]
    return lines


def _replicas(job: Job, technique: DataParallel) -> str:
    how = "DDP: each holds and steps all of the model"
    if technique.shard:
        how = "FSDP2: each holds and steps its part of every parameter"
    cut = f"each batch cut in {job.gang} by rows"
    if job.micro_batches > 1:
        cut = f"each of {job.micro_batches} batches a step cut in {job.gang} by rows"
    return f"{job.gang} replicas, a device each, {how}; {cut}"


def _shards_named(shards: Sequence[int]) -> str:
    """``"shard 0"``, ``"shards 1, 2"``."""
    return f"shard{'s' * (len(shards) > 1)} {', '.join(map(str, shards))}"


def shard_in_words(shard: ShardSpec, name: str = "shard") -> str:
    """A line of a shard, or of a stage: its layers, and bytes by name."""
    first, stop = shard.layers
    layers = f"layers {first}..{stop - 1}" if stop - first > 1 else f"layer {first}"
    backward = f"inside a backward {format_bytes(shard.backward_peak_bytes)}"
    return (
        f"{name} {shard.index}: {layers}, parameters "
        f"{format_bytes(shard.parameter_bytes)}, state {format_bytes(shard.state_bytes)}, "
        f"input {format_bytes(shard.boundary_bytes)}, inside a forward "
        f"{format_bytes(shard.forward_peak_bytes)}, {'frozen' if shard.frozen else backward}"
    )
