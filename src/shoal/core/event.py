"""What happened: the one stream that the log, the screens, the trace and the report read.

Events are past participles, flat and JSON-ready. ``time`` is Unix seconds of the
process that saw it happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from shoal.core.spec import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyStarted:
    """A study begins: written once per run, with what is needed to read it back."""

    time: float
    study: str
    metric: str
    mode: str
    trials: int
    devices: tuple[Mapping[str, Any], ...]
    source: str  # FILE.py:attribute, or "" where no attribute of a file is the study
    versions: Mapping[str, str]
    recipe: Mapping[str, Any] = field(default_factory=dict)  # then: its functions by name, if any
    by_epochs: bool = False  # how its trials' length was given, where there is no source
    arguments: tuple[str, ...] = ()  # of the command line, which its file may read


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningWaited:
    """A worker has not answered the planner for a while; sent again while that goes on."""

    time: float
    device: str
    trial: int | None  # whose code runs; None before any does
    work: str  # what it does: "start", "build" or "measure" that trial
    seconds: float  # how long it has been at that
    limit_s: float  # after so long it is taken for a hang, and ended


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningGoesOn:
    """A study has been planned for some seconds, and is still: said once."""

    time: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPlanned:
    """A run's trials were planned: those that there are when it begins."""

    time: float
    trials: int
    seconds: float  # predicted, for all of them together
    warnings: tuple[str, ...] = ()  # what its user has probably not meant
    part: float = 1.0  # of its steps that a trial does on average, where a rule ends some
    unfused: tuple[str, ...] = ()  # "N trials: REASON", where trials were to share arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlanned:
    """A trial got its job."""

    time: float
    trial: int
    hp: Mapping[str, Scalar]
    seed: int
    technique: str
    shards: int
    steps: int | None
    peak_bytes: int
    numerics: Mapping[str, Scalar]
    parent: int | None = None  # the trial it is a clone of
    warm: bool = False  # and whether it began from its parent's state
    why: tuple[str, ...] = ()  # it trains so
    recipe: int = 0  # which of the study's, counted from its first: another one was accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    """A trial's first lease began on a device."""

    time: float
    trial: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMoved:
    """A trial goes on on another device, at a step boundary."""

    time: float
    trial: int
    device: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialParked:
    """A lease ended before the trial did: its state is on the host, and it waits."""

    time: float
    trial: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResumed:
    """A trial that waited goes on on the device where it was."""

    time: float
    trial: int
    device: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRestarted:
    """A trial goes on from its last saved state: what came after it is done again."""

    time: float
    trial: int
    step: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReplanned:
    """A trial gets another job: it did not fit as planned, or others of its array were pruned.

    ``numerics``: its key, where it is another one from here on: another seat, or no array.
    """

    time: float
    trial: int
    step: int
    reason: str
    technique: str
    shards: int
    peak_bytes: int
    numerics: Mapping[str, Scalar] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialWaits:
    """A trial cannot go on with the devices that are there; it keeps what it has."""

    time: float
    trial: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStopped:
    """A trial was ended by hand or by a limit; its state is kept and it can be extended."""

    time: float
    trial: int
    step: int
    reason: str
    checkpoint: str
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPruned:
    """A trial was ended by the study's pruner; its metrics and its state are kept."""

    time: float
    trial: int
    step: int
    reason: str
    checkpoint: str
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialExploited:
    """A trial of a population goes on from the state that another one had at this step.

    ``before`` are its hyperparameters up to here, ``hp`` from here on; ``checkpoint`` is the
    generation that it goes on from, relative to the study.
    """

    time: float
    trial: int
    step: int
    source: int
    before: Mapping[str, Scalar]
    hp: Mapping[str, Scalar]
    checkpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten:
    """A generation of a trial's state is on the disk; ``path`` is relative to the study.

    ``bytes`` of tensors were written for it: not those that it shares with another one.
    """

    time: float
    trial: int
    step: int
    path: str
    bytes: int
    seconds: float  # from the copy at the step boundary to the durable rename


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDamaged:
    """A generation cannot be trusted; the one before it is used."""

    time: float
    trial: int
    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFailed:
    """Something could not be written; ``action`` is what the study did about it."""

    time: float
    path: str
    error: str
    action: str
    trial: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPaused:
    """All trials are parked and saved; no device is in use until ``StudyContinued``."""

    time: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyContinued:
    """A paused study hands out leases again."""

    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyChanged:
    """A run goes on with other than was asked for before, or planned: a sentence for each."""

    time: float
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerEnded:
    """The sampler has no more points: there are fewer ``trials`` than were ``asked`` for."""

    time: float
    sampler: str
    trials: int
    asked: int


def ended_words(event: SamplerEnded) -> str:
    """Why there are fewer trials than were asked for."""
    return (
        f"the sampler {event.sampler} has no more points: there are {event.trials} of the "
        f"{event.asked} trials asked for"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """One optimizer step: the mean loss of its micro-batches, and the seconds it took."""

    time: float
    trial: int
    step: int  # counted from 1
    epoch: int
    loss: float
    seconds: float
    device: str
    steps_per_epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A validation pass ended; names are ``valid_loss`` and ``valid_<metric>``.

    And ``train_<name>``, of what a step of one's own returns by name.
    """

    time: float
    trial: int
    step: int
    epoch: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFinished:
    """A trial ran all its steps; its weights are in ``checkpoint``."""

    time: float
    trial: int
    step: int
    metrics: Mapping[str, float]
    checkpoint: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFailed:
    """A trial ended with an error, the others go on; ``error`` is the traceback."""

    time: float
    trial: int
    step: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRestarted:
    """A process that reads a trial's data died; another one reads on at the same batch."""

    time: float
    trial: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLeftOut:
    """Something that steps changed is in no checkpoint, since none can hold it."""

    time: float
    trial: int
    step: int
    places: tuple[str, ...]  # in words; each is told once while the trial stays in a process


def left_out_words(places: Sequence[str]) -> str:
    """That some of a trial's state is as it was built, once the trial goes on elsewhere."""
    some = ", ".join(places[:3]) + ", ..." * (len(places) > 3)
    return (
        f"a step changes {some}, which is nothing that a checkpoint holds: after a resume, on "
        "another device, or after another trial's turn it is not what it is alone. Keep numbers, "
        "tensors and containers of them there, or give the module get_extra_state and "
        "set_extra_state."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted:
    """A device's worker process is ready."""

    time: float
    device: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStalled:
    """A worker has got nothing done for a while; sent again while that goes on."""

    time: float
    device: str
    trials: tuple[int, ...]  # that it has
    trial: int | None  # the one of them whose code runs, where that is known
    seconds: float  # how long nothing has moved
    limit_s: float  # after so long it is taken for a hang, and ended
    place: str  # where its code stands: FILE:LINE in NAME; empty if it did not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDied:
    """A worker process ended by itself; the trials it had restart elsewhere."""

    time: float
    device: str
    pid: int
    reason: str
    trials: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMeasured:
    """The most bytes a device held so far, beside its budget and what was predicted."""

    time: float
    device: str
    peak_bytes: int
    budget_bytes: int
    predicted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationMeasured:
    """How well the machine kept to a profile's times, since the last of these of the stream.

    Seconds are those of ``shoal.device.Fidelity``. Steps in which every allocation is counted
    are left out: the first that a trial takes on a device, and a few later ones.
    """

    time: float
    device: str
    stream: str  # "compute", "up", "down" or "host": all trials' together
    works: int
    emulated_s: float
    behind_s: float  # of real time that later work did not make up for
    overruns: int  # pieces of work that took the machine longer than the profile says
    overrun_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionFinished:
    """One action of a program on one stream of a device; seconds are Unix times."""

    device: str
    stream: str  # "compute", "up", "down" or "host"
    trial: int
    step: int
    action: str  # the action's text form
    start: float
    end: float
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFinished:
    """All trials ended. ``stopped`` is why the study stopped early, or empty."""

    time: float
    finished: int
    failed: int
    seconds: float
    stopped: str = ""
    pruned: int = 0


Event = (
    StudyStarted
    | PlanningWaited
    | PlanningGoesOn
    | StudyPlanned
    | TrialPlanned
    | TrialStarted
    | TrialMoved
    | TrialParked
    | TrialResumed
    | TrialRestarted
    | TrialReplanned
    | TrialWaits
    | TrialStopped
    | TrialPruned
    | TrialExploited
    | CheckpointWritten
    | CheckpointDamaged
    | StorageFailed
    | StudyPaused
    | StudyContinued
    | StudyChanged
    | SamplerEnded
    | StepFinished
    | Evaluated
    | TrialFinished
    | TrialFailed
    | LoaderRestarted
    | StateLeftOut
    | WorkerStarted
    | WorkerStalled
    | WorkerDied
    | PeakMeasured
    | EmulationMeasured
    | ActionFinished
    | StudyFinished
)
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Event.__args__}
_VALUES: dict[type[Any], attrgetter[tuple[Any, ...]]] = {
    kind: attrgetter(*kind.__slots__) for kind in _KINDS.values()
}


Packed = tuple[type[Any], tuple[Any, ...]]
"""An event's kind and its values in order: quicker to make and to send than the event."""


def pack_event(event: Event) -> Packed:
    """An event for the way between processes."""
    return type(event), _VALUES[type(event)](event)


def unpack_event(packed: Packed) -> Event:
    """The inverse of ``pack_event``."""
    kind, values = packed
    event: Event = kind(**dict(zip(kind.__slots__, values, strict=True)))
    return event


def event_from_dict(record: Mapping[str, Any]) -> Event | None:
    """The event of a record, or None for a kind this version does not know."""
    fields = dict(record)
    kind = _KINDS.get(fields.pop("event", ""))
    if kind is None:
        return None
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = tuple(value)
    event: Event = kind(**fields)
    return event
