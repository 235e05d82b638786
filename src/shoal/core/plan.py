"""A plan is data: which technique, shards and devices each trial gets, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shoal.core.arraykeys import ARRAY_KEYS
from shoal.core.errors import SpecError
from shoal.core.planwords import job_in_words, memory_in_words
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
)
from shoal.core.turns import DEFAULT
from shoal.core.units import (
    Bytes,
    Seconds,
    counted,
    format_foretold,
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
        """Short, as for a debugger; ``to_json`` has all."""
        jobs, devices = counted(len(self.jobs), "trial"), counted(len(self.devices), "device")
        return f"<Plan of study {self.study}: {jobs} on {devices}; print it to read it>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook shows where this is a cell's last expression."""
        printer.text(str(self))

    def explain(self) -> str:
        """The plan in words: per trial the technique, the shards, bytes by name, and why."""
        order = f", {self.rule}" if self.rule != DEFAULT else ""
        lines = [
            f"study {self.study}: {counted(len(self.jobs), 'trial')} on "
            f"{counted(len(self.devices), 'device')}, up to {self.active} at a time on each"
            f"{' (an array as one)' * any(job.array for job in self.jobs)}{order}"
            f"; predicted {format_foretold(self.seconds, len(self.jobs))}"
        ]
        lines += [f"  device {d.name}: {memory_in_words(d)}" for d in self.devices]
        first: dict[object, int] = {}
        for job in self.jobs:
            shape = (job.technique, job.shards, job.batch_bytes, job.why)
            lines += job_in_words(job, first.setdefault(shape, job.trial))
        lines += [f"  trial {n} cannot begin: {error}" for n, error in self.failures.items()]
        lines += self.notes
        lines += [f"WARNING: {warning}" for warning in self.warnings]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as JSON text that ``Plan.from_json`` reads back."""
        return json.dumps(plan_to_dict(self), indent=2)

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """Read a plan written by ``to_json``; bytes are those of its file.

        Raises:
            SpecError: it is none, or of another version of shoal.
        """
        try:
            return plan_from_dict(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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
