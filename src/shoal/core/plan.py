"""A plan is data: which technique, shards and devices each trial gets, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shoal.core.arraykeys import ARRAY_KEYS
from shoal.core.errors import SpecError
from shoal.core.seats import ALONE, Epoch, epochs_of, is_alone, rebased, told, until
from shoal.core.spec import (
    NO_BYTES,
    NO_SECONDS,
    DeviceSpec,
    Halves,
    PassKind,
    Scalar,
    ShardSpec,
    record_of,
)
from shoal.core.technique import (
    Captured,
    DataParallel,
    Pipelined,
    Resident,
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
from shoal.core.turns import DEFAULT
from shoal.core.units import (
    Bytes,
    Seconds,
    counted,
    format_bytes,
    format_foretold,
    format_seconds,
    format_value,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoneNeed:
    """What a trial of an array would take by itself, as in ``Job``.

    Of an array that is spilled also how, in the same shards; else it is resident as it was.
    """

    held_bytes: Bytes
    unit_bytes: Bytes
    peak_bytes: Bytes
    step_s: Seconds
    technique: Spilled | None = None
    shards: tuple[ShardSpec, ...] = ()
    waiting_bytes: Bytes = NO_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRoom:
    """An array of ``width`` that a trial may come to: whom it shares it with, and what it takes.

    It is for the last ``most`` trials of their generation; None: for any number. ``step_s`` are of
    one trial. Of an array that is spilled, to which a trial that left it may have to go back, also
    how.
    """

    group: str
    width: int
    kind: PassKind
    held_bytes: Bytes
    unit_bytes: Bytes
    peak_bytes: Bytes
    step_s: Seconds
    most: int | None = None
    captures: bool = True
    technique: Spilled | None = None
    shards: tuple[ShardSpec, ...] = ()
    waiting_bytes: Bytes = NO_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlace:
    """A trial's slot in an array of ``width``; trials of one ``group`` may share an array.

    On a device two trials never have one slot at a time. A trial's bits depend on ``slot``,
    ``width`` and ``kind``, how the array's passes run, and on nobody else in the array.
    ``constants`` are those of its code, where it is compiled. ``captures``: passes of slots are
    captured where they can be, to the same bits. ``rooms`` are the arrays in which the trial may
    get another seat once others were pruned, the widest first; without any it keeps its own. The
    last ``alone_most`` of a generation go on by themselves.
    """

    group: str
    slot: int
    width: int
    alone: LoneNeed
    kind: PassKind = "eager"
    captures: bool = True
    constants: str = ""
    rooms: tuple[ArrayRoom, ...] = ()
    alone_most: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One trial with its technique: the unit that is placed on devices.

    ``held_bytes`` stay reserved between units while the trial is leased to a device,
    ``unit_bytes`` is the most one unit needs on top while it runs, ``peak_bytes`` the most
    at any moment of its programs: less than the sum where the two do not coincide. Of
    ``host_bytes`` the trial takes ``waiting_bytes`` on a device alone: what waits there between
    forward and backward, what split weights are put together in, or an array's rows. Where the
    trial has a place in an array, what is held, a unit's and the peak are the whole array's, and
    ``began`` is its first place, if it has another one by now, or trains by itself; where
    it is a pipeline, of the stage that needs most, and ``shards`` are its stages, or those of its
    spilled stages; where there are replicas of it, of the one that needs most, and the only shard
    is what a replica of it computes. ``moves_s`` are a step's seconds with all that moves in it,
    beside as many trials as share the device, and ``reads_s`` those of reading its batches, for
    which the device waits. ``disk_bytes`` are those of the trial's home where that is a file; they
    are not in ``host_bytes`` then.
    """

    trial: int
    hp: Mapping[str, Scalar]
    seed: int
    technique: Technique
    shards: tuple[ShardSpec, ...]
    batch_bytes: Bytes
    buffer_bytes: Bytes
    held_bytes: Bytes
    unit_bytes: Bytes
    peak_bytes: Bytes
    host_bytes: Bytes
    step_s: Seconds  # predicted seconds of one optimizer step on one device
    micro_batches: int
    why: tuple[str, ...]
    numerics: Mapping[str, Scalar]
    array: ArrayPlace | None = None
    began: ArrayPlace | None = None
    waiting_bytes: Bytes = NO_BYTES
    moves_s: Seconds = NO_SECONDS
    reads_s: Seconds = NO_SECONDS
    disk_bytes: Bytes = NO_BYTES
    foretells: bool = False  # its micro-batches overlap, and what each one draws is drawn ahead
    frozen_bytes: Bytes = NO_BYTES  # of parameters that its generations share, as built
    frozen: str = ""  # the same for jobs with the same bits in them; empty where not known
    base_bytes: Bytes = NO_BYTES  # of frozen weights that an array of such trials has once

    @property
    def takes_s(self) -> Seconds:
        """Predicted seconds of the device for a step, with what moves in it and what is read."""
        return Seconds(max(self.step_s, self.moves_s) + self.reads_s)

    @property
    def runs_on(self) -> bool:
        """Whether its steps overlap, so that each stop costs it time."""
        return isinstance(self.technique, Pipelined) and self.technique.is_stale

    @property
    def gang(self) -> int:
        """Devices that the trial has at a time."""
        if isinstance(self.technique, DataParallel):
            return self.technique.width or 1
        if isinstance(self.technique, Pipelined):
            return (self.technique.stages or len(self.shards)) * self.technique.width
        return 1

    @property
    def parts(self) -> int:
        """What a record counts: the stages of a pipeline, or else shards."""
        if isinstance(self.technique, Pipelined):
            return self.technique.stages or len(self.shards)
        return len(self.shards)


OWN_DIRECTORY = "."
"""For ``Plan.spill_dir``: the study's own directory, wherever that is."""


def with_seats(key: Mapping[str, Scalar], epochs: Sequence[Epoch]) -> dict[str, Scalar]:
    """A numerics key that tells of these seats, and of no array where there never was one."""
    if is_alone(epochs):
        return {name: value for name, value in key.items() if name not in ARRAY_KEYS}
    return {**key, "array": told(epochs)}


def of_its_arrays(job: Job) -> dict[str, Scalar]:
    """What the key of a trial that is in no array says of those in which it was."""
    key, epochs = job.numerics, epochs_of(job.numerics)
    if job.array is None and epochs and epochs[-1].width == ALONE:
        return {name: key[name] for name in (*ARRAY_KEYS, "array_company") if name in key}
    return {}


BITWISE = "bitwise in the pilot"
"""How a numerics key says that a chain was compared with its module, and equal."""


def seated(job: Job, epochs: Sequence[Epoch]) -> Job:
    """The job of a trial of an array after these epochs: where the last one has it.

    Raises:
        KeyError: it has no such room.
    """
    first, last = job.began or job.array, epochs[-1]
    assert first is not None
    if not first.rooms:
        first = replace(first, rooms=(room_of(job),))
    takes: LoneNeed | ArrayRoom = first.alone
    place = None
    if last.width != ALONE:
        takes = room = {room.width: room for room in first.rooms}[last.width]
        place = replace(
            first,
            group=room.group,
            slot=last.slot,
            width=room.width,
            kind=room.kind,
            captures=room.captures,
        )
    waiting = takes.waiting_bytes if takes.technique else job.waiting_bytes
    return replace(
        job,
        array=place,
        began=first if len(epochs) > 1 else None,
        technique=takes.technique or job.technique,
        shards=takes.shards or job.shards,
        waiting_bytes=waiting,
        host_bytes=Bytes(job.host_bytes - job.waiting_bytes + waiting),
        held_bytes=takes.held_bytes,
        unit_bytes=takes.unit_bytes,
        peak_bytes=takes.peak_bytes,
        step_s=takes.step_s,
        numerics=with_seats(job.numerics, epochs),
    )


def room_of(job: Job) -> ArrayRoom:
    """What a job takes in the array that it is in."""
    place = job.array
    assert place is not None
    spilled = job.technique if isinstance(job.technique, Spilled) else None
    return ArrayRoom(
        group=place.group,
        width=place.width,
        kind=place.kind,
        held_bytes=job.held_bytes,
        unit_bytes=job.unit_bytes,
        peak_bytes=job.peak_bytes,
        step_s=job.step_s,
        captures=place.captures,
        technique=spilled,
        shards=job.shards if spilled else (),
        waiting_bytes=job.waiting_bytes if spilled else NO_BYTES,
    )


def seated_at(job: Job, step: int) -> Job:
    """The job of a trial that goes on after ``step`` steps."""
    epochs = epochs_of(job.numerics)
    there = until(rebased(epochs, step), step)
    if there == epochs:
        return job
    if (job.began or job.array) and not is_alone(there):
        return seated(job, there)
    if not there or there[-1].width != ALONE:
        return job
    return replace(job, numerics=with_seats(job.numerics, there))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every trial's job, and the devices they share. Immutable; equal after a JSON round trip."""

    study: str
    devices: tuple[DeviceSpec, ...]
    jobs: tuple[Job, ...]
    active: int  # trials that share one device at a time
    seconds: Seconds  # predicted for the study
    failures: Mapping[int, str] = field(default_factory=dict)  # trials that cannot begin
    notes: tuple[str, ...] = ()  # lines that explain the whole study
    rule: str = DEFAULT  # which of the trials of a device goes first
    warnings: tuple[str, ...] = ()  # what its user has probably not meant
    spill_dir: str = ""  # where the trials' homes are files; "": they are in the host's memory

    @property
    def at_once(self) -> int:
        """Trials that train at a time, on all devices together, at most."""
        places = [job.began or job.array for job in self.jobs]
        widest = max((place.width for place in places if place), default=1)
        return len(self.devices) * self.active * widest

    def __str__(self) -> str:
        """What ``print`` shows: the plan in words."""
        return self.explain()

    def __repr__(self) -> str:
        """What a notebook shows of it; ``to_json`` has all."""
        jobs, devices = counted(len(self.jobs), "trial"), counted(len(self.devices), "device")
        return f"<Plan of study {self.study}: {jobs} on {devices}; print it to read it>"

    def explain(self) -> str:
        """The plan in words: per trial the technique, the shards, bytes by name, and why."""
        order = f", {self.rule}" if self.rule != DEFAULT else ""
        lines = [
            f"study {self.study}: {counted(len(self.jobs), 'trial')} on "
            f"{counted(len(self.devices), 'device')}, up to {self.active} at a time on each"
            f"{' (an array as one)' * any(job.array for job in self.jobs)}{order}"
            f"; predicted {format_foretold(self.seconds, len(self.jobs))}"
        ]
        lines += [f"  device {d.name}: {_explain_memory(d)}" for d in self.devices]
        first: dict[object, int] = {}
        for job in self.jobs:
            shape = (job.technique, job.shards, job.batch_bytes, job.why)
            lines += _explain_job(job, first.setdefault(shape, job.trial))
        lines += [f"  trial {n} cannot begin: {error}" for n, error in self.failures.items()]
        lines += self.notes
        lines += [f"WARNING: {warning}" for warning in self.warnings]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as JSON text that ``Plan.from_json`` reads back."""
        return json.dumps(plan_to_dict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan written by ``to_json``.

        Raises:
            SpecError: it is none, or of another version of shoal.
        """
        try:
            return plan_from_dict(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpecError(
                f"this is no plan that Plan.to_json or shoal plan --json wrote, or one of another "
                f"version of shoal ({type(error).__name__}: {error}). Plan again."
            ) from error


def seconds_of_work(plan: Plan, taken: Mapping[int, float]) -> float:
    """How long trials take that need so many seconds of a device each.

    That is their work over the devices, or the longest trial.
    """
    work = sum(taken[job.trial] * job.gang for job in plan.jobs)
    return max(work / max(1, len(plan.devices)), max(taken.values(), default=0.0))


def _explain_memory(device: DeviceSpec) -> str:
    """What trials may have of a device is less than all where libraries keep some of it."""
    if not device.library_bytes:
        return format_bytes(device.memory)
    own = format_bytes(device.library_bytes)
    return f"of {format_bytes(device.memory)}, {own} are the libraries' own"


def _explain_job(job: Job, like: int) -> list[str]:
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
        lines += _explain_shards(shards, job.technique)
    if isinstance(job.technique, Pipelined):
        lines += _explain_pipeline(job, job.technique)
    if isinstance(job.technique, DataParallel):
        lines.append(f"    {_explain_replicas(job, job.technique)}")
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
    name = f"slot {place.slot} of an array of {place.width}{way}{_explain_rooms(place)}"
    return f"{technique}, {name}" if isinstance(job.technique, Spilled) else name


def _explain_rooms(place: ArrayPlace) -> str:
    """Who goes on elsewhere once others were pruned."""
    parts = [f"the last {r.most} in an array of {r.width}" for r in place.rooms if r.most]
    parts += [f"the last {place.alone_most} alone"] * bool(place.alone_most)
    return f" (of its generation {', '.join(parts)})" if parts else ""


def _part(technique: Technique) -> str:
    is_cut = isinstance(technique, Pipelined) and not technique.is_spilled
    return "stage" if is_cut else "shard"


def _explain_shards(shards: Sequence[ShardSpec], technique: Spilled) -> list[str]:
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
    return [*lines, *(f"    {_explain_shard(shard)}" for shard in shards)]


def _explain_pipeline(job: Job, technique: Pipelined) -> list[str]:
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
    parts = [f"    {_explain_shard(shard, 'stage')}" for shard in job.shards]
    if technique.is_spilled:
        saves, parts = _explain_spilled(technique), _explain_stages(job, technique)
    how = f"schedule {technique.known_schedule}{lag}{weights}{guess}"
    return [
        f"    {copies}{counted(count, 'stage')}, a device each, {how}; {step}; {saves}",
        *parts,
    ]


def _explain_spilled(technique: Pipelined) -> str:
    where = "wait on the device" if technique.keep_gradients else "go to the host"
    said = f"the stages are spilled: {technique.shards} shards, the optimizer steps on the "
    said += f"{technique.optimizer}, shards are loaded {technique.lookahead} ahead"
    return f"{said}, gradients {where} between micro-batches"


def _explain_stages(job: Job, technique: Pipelined) -> list[str]:
    lines, kept = [], set(kept_shards(technique))
    for stage, (first, stop) in enumerate(spans_of(technique, job.shards)):
        stay = ", ".join(str(shard) for shard in range(first, stop) if shard in kept) or "none"
        lines.append(
            f"    stage {stage}: {counted(stop - first, 'shard')}; between steps stay: {stay}"
        )
        lines += [f"      {_explain_shard(shard)}" for shard in job.shards[first:stop]]
    return lines


def _explain_replicas(job: Job, technique: DataParallel) -> str:
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


def _explain_shard(shard: ShardSpec, name: str = "shard") -> str:
    first, stop = shard.layers
    layers = f"layers {first}..{stop - 1}" if stop - first > 1 else f"layer {first}"
    backward = f"inside a backward {format_bytes(shard.backward_peak_bytes)}"
    return (
        f"{name} {shard.index}: {layers}, parameters "
        f"{format_bytes(shard.parameter_bytes)}, state {format_bytes(shard.state_bytes)}, "
        f"input {format_bytes(shard.boundary_bytes)}, inside a forward "
        f"{format_bytes(shard.forward_peak_bytes)}, {'frozen' if shard.frozen else backward}"
    )


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Plain containers only, ready for JSON; techniques carry their name under ``kind``."""
    record = asdict(plan, dict_factory=record_of)
    for job, entry in zip(plan.jobs, record["jobs"], strict=True):
        entry["technique"] = {"kind": type(job.technique).__name__, **asdict(job.technique)}
        entry["hp"], entry["numerics"] = dict(job.hp), dict(job.numerics)
    return record


def plan_from_dict(record: Mapping[str, Any]) -> Plan:
    """The inverse of ``plan_to_dict``."""
    every = (Resident, Captured, Spilled, Pipelined, DataParallel)
    kinds = {kind.__name__: kind for kind in every}
    jobs = []
    for entry in record["jobs"]:
        technique = dict(entry["technique"])
        kind = kinds[technique.pop("kind")]
        shards = _shards_from(entry["shards"])
        array = _array_from(entry["array"]) if entry.get("array") else None
        began = _array_from(entry["began"]) if entry.get("began") else None
        built: Technique = kind(**technique)
        changed: dict[str, Any] = {"technique": built, "shards": shards}
        changed["why"] = tuple(entry["why"])
        changed |= {"array": array, "began": began}
        jobs.append(Job(**{**entry, **changed}))
    devices = tuple(DeviceSpec(**device) for device in record["devices"])
    failures = {int(number): error for number, error in record["failures"].items()}
    known = {"devices": devices, "jobs": tuple(jobs), "failures": failures}
    known |= {name: tuple(record.get(name, ())) for name in ("notes", "warnings")}
    return Plan(**{**record, **known})


def _shards_from(records: Sequence[Mapping[str, Any]]) -> tuple[ShardSpec, ...]:
    return tuple(_shard_from(shard) for shard in records)


def _shard_from(record: Mapping[str, Any]) -> ShardSpec:
    rebuilt = {
        "layers": tuple(record["layers"]),
        "halves": Halves(**record["halves"]) if record.get("halves") else None,
        "step_chunks": tuple(record.get("step_chunks", ())),
    }
    known = {name: value for name, value in record.items() if name != "half_bytes"}
    return ShardSpec(**{**known, **rebuilt})


def _array_from(record: Mapping[str, Any]) -> ArrayPlace:
    alone = LoneNeed(**_need_from(record["alone"]))
    rooms = tuple(ArrayRoom(**_need_from(room)) for room in record.get("rooms", ()))
    return ArrayPlace(**{**record, "alone": alone, "rooms": rooms})


def _need_from(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a trial takes alone or in an array; how, where that is in shards."""
    technique, shards = record.get("technique"), record.get("shards", ())
    return {
        **record,
        "technique": Spilled(**technique) if technique else None,
        "shards": _shards_from(shards),
    }
