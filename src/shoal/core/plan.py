"""A plan is data: which technique, shards and devices each trial gets, and why."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shoal.core.errors import PlanError, SpecError
from shoal.core.spec import DeviceSpec, Order, Place, Scalar, ShardSpec, Transfer
from shoal.core.units import Bytes, Seconds, format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Resident:
    """The whole model stays on the device; nothing moves inside a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spilled:
    """The model is cut into shards that visit the device one after another.

    ``shards`` is how many, None for the fewest that fit. ``optimizer`` is where
    the step runs: on the device, with the state travelling, or on the host copies.
    ``lookahead`` is how many units ahead of the running one are loaded, ``lookbehind`` how many
    behind it may have left gradients or inputs that are still on their way to the host: 1, or 0
    to have their room. ``keep`` are
    shards that stay on the device and step there, None for as many as fit; none of them
    where the whole model would fit and spilling was asked for all the same. Of those in
    ``keep_weights`` the parameters stay, and the optimizer's state travels to the device for
    each step; it goes with ``keep`` and with the step on the device, as ``keep_head`` does: a
    shard more, and how many bytes of its parameters stay, or where those stay of its state, in
    whole tensors from the first on. ``order``
    "shard" has a shard run all micro-batches of a step while it is on the device, which
    gives the same bits where the model draws no random numbers and no two layers share, or
    read from each other, what a forward changes (a BatchNorm used twice). Nothing chooses it
    but you; ``shoal verify`` is the proof. ``boundaries`` is where a shard's input waits between
    its forward and its backward, None for wherever there is room: on the host where the device
    has none, or where that room is better used. ``keep_turn`` is how many shards more, those next
    to the turn from forward to backward, hold their parameters from one to the other, None for as
    many as fit; it goes with the step on the host. ``keep_gradients`` goes with the step on the
    device: of how many shards, the first ones that are not kept, the gradients stay there while
    they wait, for clipping or for more micro-batches; None for as many as fit. ``recompute`` True
    runs every shard's forward
    again before its backward; "auto" leaves that out where there is room for what the forward
    saved, for the shards named in ``keep_activations`` if that is not None. They are shards
    whose parameters stay on the device. ``transfer`` "bf16" has weights travel as the
    bfloat16 that autocast makes of them, where nothing else reads them: half the bytes and the
    same bits, with the step on the host; None does so where it can, "fp32" never. A forward that
    reads such a weight otherwise than the measured one has its trial planned again, with whole
    weights, from its newest generation. Shards that stay are whole either way.
    """

    shards: int | None = None
    optimizer: Place | None = None
    lookahead: int | None = None
    lookbehind: int | None = None
    keep: tuple[int, ...] | None = None
    keep_weights: tuple[int, ...] = ()
    keep_head: tuple[int, int] | None = None
    keep_turn: int | None = None
    keep_gradients: int | None = None
    order: Order | None = None
    boundaries: Place | None = None
    transfer: Transfer | None = None
    offload: str = "host"
    recompute: bool | str = "auto"
    keep_activations: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.shards is not None and self.shards < 1:
            raise SpecError(f"Spilled(shards=...) must be at least 1, got {self.shards}")
        if self.optimizer not in (None, "device", "host"):
            raise SpecError(f"optimizer is 'device' or 'host', got {self.optimizer!r}")
        if self.lookahead not in (None, 0, 1, 2):
            raise SpecError(f"lookahead is 0, 1 or 2, got {self.lookahead!r}")
        if type(self.lookbehind) not in (type(None), int) or self.lookbehind not in (None, 0, 1):
            raise SpecError(f"lookbehind is 0 or 1, got {self.lookbehind!r}")
        if self.order not in (None, "micro", "shard"):
            raise SpecError(f"order is 'micro' or 'shard', got {self.order!r}")
        if self.boundaries not in (None, "device", "host"):
            raise SpecError(f"boundaries is 'device' or 'host', got {self.boundaries!r}")
        self._check_turn()
        self._check_gradients()
        self._check_head()
        if self.transfer not in (None, "bf16", "fp32"):
            raise SpecError(f"transfer is 'bf16' or 'fp32', got {self.transfer!r}")
        if self.transfer == "bf16" and (self.optimizer == "device" or self.keep_weights):
            raise SpecError(
                "transfer='bf16' with the step on the device, which needs the weights whole. "
                "Step on the host, or leave transfer= out."
            )
        if self.keep_weights and self.keep is None:
            object.__setattr__(self, "keep", ())
        if self.keep_weights and self.optimizer is None:
            object.__setattr__(self, "optimizer", "device")
        if self.keep is not None:
            self._check_keep("keep", self.keep)
        self._check_keep("keep_weights", self.keep_weights)
        if self.keep_weights and self.optimizer == "host":
            raise SpecError(
                f"keep_weights={self.keep_weights} with the step on the host: the copies on the "
                "device would be old after each step. Name the shards in keep=, or step on the "
                "device."
            )
        if self.offload != "host":
            raise PlanError(f"offload={self.offload!r} cannot be done yet; use offload='host'.")
        self._check_recompute()

    def _check_turn(self) -> None:
        count = self.keep_turn
        if count is not None and (type(count) is not int or count < 0):
            raise SpecError(f"keep_turn is a number of shards, 0 or more, got {count!r}")
        if count and self.optimizer is None:
            object.__setattr__(self, "optimizer", "host")
        if count and self.optimizer == "device":
            raise SpecError(
                f"keep_turn={count} with the step on the device: what room there is has better "
                "uses there. Name shards in keep_weights=, or step on the host."
            )

    def _check_gradients(self) -> None:
        count = self.keep_gradients
        if count is not None and (type(count) is not int or count < 0):
            raise SpecError(f"keep_gradients is a number of shards, 0 or more, got {count!r}")
        if count and self.optimizer is None:
            object.__setattr__(self, "optimizer", "device")
        if count and self.optimizer == "host":
            raise SpecError(
                f"keep_gradients={count} with the step on the host, where the gradients go. Leave "
                "it out, or step on the device."
            )

    def _check_head(self) -> None:
        if self.keep_head is None:
            return
        if not _is_pair(self.keep_head):
            raise SpecError(
                f"keep_head is a shard and a number of bytes, as in (2, 65536), got "
                f"{self.keep_head!r}"
            )
        shard, num_bytes = self.keep_head
        object.__setattr__(self, "keep_head", (shard, num_bytes))
        if self.keep is None:
            object.__setattr__(self, "keep", ())
        if self.optimizer != "device":
            raise SpecError(
                f"keep_head={self.keep_head} without the step on the device: it would be old "
                "after each step. Add optimizer='device', or leave it out."
            )
        if num_bytes < 1 or shard in (self.keep or ()) or shard not in range(self.shards or 0):
            raise SpecError(
                f"keep_head={self.keep_head} names a shard that is not in keep={self.keep}, of "
                f"shards={self.shards}, and at least one byte of it. Leave it out to keep what "
                "fits."
            )

    def _check_recompute(self) -> None:
        if self.recompute is False:
            raise PlanError(
                "recompute=False cannot be done for every shard: of those that travel the "
                "parameters are gone when the backward comes. Use recompute='auto', or name "
                "shards that stay in keep_activations=."
            )
        if self.recompute is not True and self.recompute != "auto":
            raise SpecError(f"recompute is True or 'auto', got {self.recompute!r}")
        if self.recompute is True:
            if self.keep_activations:
                raise SpecError(
                    f"recompute=True recomputes every shard, and keep_activations="
                    f"{self.keep_activations} names some that shall not. Leave one of them out."
                )
            object.__setattr__(self, "keep_activations", ())
        elif self.keep_activations is not None:
            self._check_keep("keep_activations", self.keep_activations)

    def _check_keep(self, name: str, shards: Iterable[int]) -> None:
        if not isinstance(shards, Iterable):
            raise SpecError(f"{name} names shards, as in {name}=(0, 2), got {shards!r}")
        keep = tuple(shards)
        if self.shards is None and keep:
            raise SpecError(
                f"Spilled({name}={keep}) names shards; say how many there are with shards=."
            )
        if not all(type(s) is int and 0 <= s < (self.shards or 0) for s in keep):
            raise SpecError(
                f"{name} names shards from 0 to {(self.shards or 0) - 1}, got {keep}. Leave it "
                "out to keep as many as fit."
            )
        object.__setattr__(self, name, tuple(sorted(set(keep))))


Technique = Resident | Spilled


def kept_shards(technique: Technique) -> tuple[int, ...]:
    """The shards that stay on the device between steps: of a resident model its only one."""
    if isinstance(technique, Resident):
        return (0,)
    return technique.keep or ()


def kept_weights(technique: Technique) -> tuple[int, ...]:
    """Shards of which the parameters alone stay on the device between steps."""
    if isinstance(technique, Resident):
        return ()
    return tuple(s for s in technique.keep_weights if s not in kept_shards(technique))


def kept_heads(technique: Technique) -> tuple[int, ...]:
    """Shards that travel, but for some of their tensors, which stay on the device."""
    if isinstance(technique, Resident) or technique.keep_head is None:
        return ()
    return (technique.keep_head[0],)


def turned_shards(technique: Technique, num_shards: int) -> tuple[int, ...]:
    """Shards that hold their parameters from forward to backward outside the slots.

    The last of those that travel, but for the ones that find theirs in a slot at the turn.
    """
    if isinstance(technique, Resident) or not technique.keep_turn:
        return ()
    travel = [shard for shard in range(num_shards) if shard not in kept_shards(technique)]
    in_slots = 1 + (technique.lookahead or 0)
    return tuple(travel[:-in_slots][-technique.keep_turn :])


def waiting_gradients(technique: Technique, num_shards: int) -> tuple[int, ...]:
    """Shards that are not kept and whose gradients wait on the device for their step."""
    if isinstance(technique, Resident) or not technique.keep_gradients:
        return ()
    kept = kept_shards(technique)
    travel = [shard for shard in range(num_shards) if shard not in kept]
    return tuple(travel[: technique.keep_gradients])


def travels_narrow(technique: Technique, shard: int) -> bool:
    """Whether weights of a shard that autocast alone reads travel as bfloat16."""
    if isinstance(technique, Resident) or technique.transfer != "bf16":
        return False
    return technique.optimizer == "host" and shard not in kept_shards(technique)


def as_they_travel(shards: Sequence[ShardSpec], technique: Technique) -> tuple[ShardSpec, ...]:
    """The shards of a measure as a technique moves them; of a job's shards the same again."""
    return tuple(_as_it_travels(shard, technique) for shard in shards)


def _with_head(shard: ShardSpec, technique: Technique) -> ShardSpec:
    if isinstance(technique, Resident) or shard.index not in kept_heads(technique):
        return shard
    assert technique.keep_head is not None
    return replace(
        shard,
        head_bytes=Bytes(technique.keep_head[1]),
        head_of_state=shard.index in kept_weights(technique),
    )


def _as_it_travels(shard: ShardSpec, technique: Technique) -> ShardSpec:
    shard = _with_head(shard, technique)
    narrow = shard.narrow
    if narrow is None or not travels_narrow(technique, shard.index):
        return replace(shard, narrow=None) if narrow else shard
    return replace(
        shard,
        parameter_bytes=Bytes(narrow.parameter_bytes + shard.parameter_bytes - shard.owned_bytes),
        gradient_bytes=narrow.gradient_bytes,
        forward_peak_bytes=narrow.forward_peak_bytes,
        backward_peak_bytes=narrow.backward_peak_bytes,
        saved_bytes=None if shard.saved_bytes is None else narrow.saved_bytes,
        saved_output_bytes=narrow.saved_output_bytes,
        saving_peak_bytes=narrow.saving_peak_bytes,
        forward_s=narrow.forward_s,
        backward_s=narrow.backward_s,
        step_s=narrow.step_s,
        narrow=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoneNeed:
    """What a trial of an array would take by itself, as in ``Job``."""

    held_bytes: Bytes
    unit_bytes: Bytes
    peak_bytes: Bytes
    step_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlace:
    """A trial's slot in an array of ``width``; trials of one ``group`` may share an array.

    On a device two trials never have one slot at a time. A trial's bits depend on ``slot`` and
    ``width``, and on nobody else in the array.
    """

    group: str
    slot: int
    width: int
    alone: LoneNeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One trial with its technique: the unit that is placed on devices.

    ``held_bytes`` stay reserved between units while the trial is leased to a device,
    ``unit_bytes`` is the most one unit needs on top while it runs, ``peak_bytes`` the most
    at any moment of its programs: less than the sum where the two do not coincide. Where the
    trial has a place in an array, all three are the whole array's.
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


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and [type(item) for item in value] == [int, int]


NO_ARRAY = "none since step"
"""How the numerics key of a trial begins that left its array for good, with the step."""


def alone(job: Job, step: int, why: str) -> Job:
    """The job of a trial that leaves its array after ``step`` steps and trains by itself."""
    assert job.array is not None
    need, key = job.array.alone, {k: v for k, v in job.numerics.items() if k != "array"}
    return replace(
        job,
        array=None,
        held_bytes=need.held_bytes,
        unit_bytes=need.unit_bytes,
        peak_bytes=need.peak_bytes,
        step_s=need.step_s,
        why=(*job.why, why),
        numerics={**key, "array": f"{NO_ARRAY} {step}"} if step else key,
    )


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

    @property
    def at_once(self) -> int:
        """Trials that train at a time, on all devices together, at most."""
        widest = max((job.array.width for job in self.jobs if job.array), default=1)
        return len(self.devices) * self.active * widest

    def explain(self) -> str:
        """The plan in words: per trial the technique, the shards, bytes by name, and why."""
        lines = [
            f"study {self.study}: {len(self.jobs)} trials on {len(self.devices)} devices, "
            f"up to {self.active} at a time on each; predicted {format_seconds(self.seconds)}"
        ]
        lines += [f"  device {d.name}: {format_bytes(d.memory)}" for d in self.devices]
        first: dict[object, int] = {}
        for job in self.jobs:
            shape = (job.technique, job.shards, job.batch_bytes, job.why)
            lines += _explain_job(job, first.setdefault(shape, job.trial))
        lines += [f"  trial {n} cannot begin: {error}" for n, error in self.failures.items()]
        lines += self.notes
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as JSON text that ``Plan.from_json`` reads back."""
        return json.dumps(plan_to_dict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan written by ``to_json``."""
        return plan_from_dict(json.loads(text))


def _explain_job(job: Job, like: int) -> list[str]:
    """A job in full, or that it is like the first job of its shape."""
    name = type(job.technique).__name__
    if job.array:
        name += f", slot {job.array.slot} of an array of {job.array.width}"
    settings = ", ".join(f"{k}={v}" for k, v in job.hp.items())
    lines = [f"  trial {job.trial} ({settings}; seed {job.seed}): {name}"]
    if like != job.trial:
        return [f"{lines[0]}, as trial {like}"]
    shards = job.shards
    total = {
        "parameters": sum(s.owned_bytes for s in shards),
        "gradients": sum(s.gradient_bytes for s in shards),
        "optimizer state": sum(s.state_bytes for s in shards),
        "boundaries": sum(s.boundary_bytes for s in shards),
        "buffers": job.buffer_bytes,
        "batch": job.batch_bytes,
    }
    if isinstance(job.technique, Spilled):
        place = job.technique.optimizer
        lines.append(f"    {len(shards)} shards, the optimizer steps on the {place}")
        if job.technique.transfer == "bf16":
            lines.append("    weights that only bf16 products read travel as bfloat16")
        if kept := kept_shards(job.technique):
            names = ", ".join(map(str, kept))
            lines.append(f"    {len(kept)} of them stay on the device and step there: {names}")
        if weights := kept_weights(job.technique):
            names = ", ".join(map(str, weights))
            lines.append(f"    of {len(weights)} the parameters stay, the state travels: {names}")
        if head := job.technique.keep_head:
            part = "state" if head[0] in kept_weights(job.technique) else "parameters"
            size = format_bytes(Bytes(head[1]))
            lines.append(f"    of the {part} of shard {head[0]} {size} stay too")
        if turned := turned_shards(job.technique, len(shards)):
            names = ", ".join(map(str, turned))
            lines.append(f"    {len(turned)} stay from forward to backward: {names}")
        if waiting := waiting_gradients(job.technique, len(shards)):
            names = ", ".join(map(str, waiting))
            lines.append(f"    of {len(waiting)} gradients wait for the step there: {names}")
        if saves := job.technique.keep_activations:
            names = ", ".join(map(str, saves))
            lines.append(f"    {len(saves)} do not recompute their forward: {names}")
        lines += [f"    {_explain_shard(shard)}" for shard in shards]
    lines.append("    " + ", ".join(f"{k} {format_bytes(v)}" for k, v in total.items() if v))
    whose = ", the whole array" if job.array else ""
    lines.append(
        f"    on the device{whose}: up to {format_bytes(job.held_bytes)} held, up to "
        f"{format_bytes(job.unit_bytes)} more inside a unit, {format_bytes(job.peak_bytes)} at "
        f"the peak; on the host {format_bytes(job.host_bytes)}; "
        f"{format_seconds(job.step_s)} a step"
    )
    lines += [f"    because {reason}" for reason in job.why]
    lines.append("    numerics: " + ", ".join(f"{k}={v}" for k, v in job.numerics.items()))
    return lines


def _explain_shard(shard: ShardSpec) -> str:
    first, stop = shard.layers
    return (
        f"shard {shard.index}: layers {first}..{stop - 1}, parameters "
        f"{format_bytes(shard.parameter_bytes)}, state {format_bytes(shard.state_bytes)}, "
        f"boundary {format_bytes(shard.boundary_bytes)}, inside a forward "
        f"{format_bytes(shard.forward_peak_bytes)}, inside a backward "
        f"{format_bytes(shard.backward_peak_bytes)}"
    )


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Plain containers only, ready for JSON; techniques carry their name under ``kind``."""
    record = asdict(plan)
    for job, entry in zip(plan.jobs, record["jobs"], strict=True):
        entry["technique"] = {"kind": type(job.technique).__name__, **asdict(job.technique)}
        entry["hp"], entry["numerics"] = dict(job.hp), dict(job.numerics)
    return record


def plan_from_dict(record: Mapping[str, Any]) -> Plan:
    """The inverse of ``plan_to_dict``."""
    kinds = {"Resident": Resident, "Spilled": Spilled}
    jobs = []
    for entry in record["jobs"]:
        technique = dict(entry["technique"])
        kind = kinds[technique.pop("kind")]
        shards = tuple(
            ShardSpec(**{**shard, "layers": tuple(shard["layers"])}) for shard in entry["shards"]
        )
        array = _array_from(entry["array"]) if entry.get("array") else None
        changed = {"technique": kind(**technique), "shards": shards, "why": tuple(entry["why"])}
        changed["array"] = array
        jobs.append(Job(**{**entry, **changed}))
    devices = tuple(DeviceSpec(**device) for device in record["devices"])
    failures = {int(number): error for number, error in record["failures"].items()}
    known = {"devices": devices, "jobs": tuple(jobs), "failures": failures}
    return Plan(**{**record, **known, "notes": tuple(record.get("notes", ()))})


def _array_from(record: Mapping[str, Any]) -> ArrayPlace:
    return ArrayPlace(**{**record, "alone": LoneNeed(**record["alone"])})
