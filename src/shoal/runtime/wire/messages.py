"""What the study's process and its workers say to each other.

Orders go to a worker, replies and events come back, in order, over a socket that only
the two processes have. Descriptors of host memory travel beside the order that
needs them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.core.aim import Aim
from shoal.core.arraykeys import NO_BASE, Base
from shoal.core.event import Event, Packed, unpack_event
from shoal.core.plan import Job
from shoal.core.spec import (
    NO_BYTES,
    NO_SECONDS,
    DeviceSpec,
    JobMeasure,
    PassKind,
    ShardSpec,
    TrialSpec,
)
from shoal.core.turns import DEFAULT
from shoal.core.units import Bytes, Seconds
from shoal.memory.layout import TrialLayout

if TYPE_CHECKING:  # this module is read before torch is: a worker starts while it loads
    from shoal.data import Position
    from shoal.fusion import Signature
    from shoal.kernels.kernelchoice import KernelChoice
    from shoal.rng import RngState


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is common to all trials of a study, as a worker needs it."""

    steps: int | None
    epochs: int | None
    eval_every: int | None
    directory: str  # the study's, where checkpoints go
    checkpoint_every_s: float
    timeline: bool
    keep: int = 2  # generations of a trial that is not finished
    keep_finished: str = "all"  # or "weights"
    varied: tuple[str, ...] = ()  # hyperparameters that change while a trial trains
    metric: str = ""  # the study's
    best: Aim | None = None  # of which each trial's best evaluation is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A trial's state at a step boundary, beside its tensors in the host store."""

    step: int
    position: Position
    valid: Position | None  # of the validation data, which may keep something too
    rng: RngState
    scalars: Mapping[str, Mapping[str, Any]]
    stored: Mapping[str, Sequence[str]]
    groups: Sequence[Mapping[str, Any]]
    schedule: Mapping[str, Any] | None
    scheduled: str = ""  # of which kind that is; empty where nobody wrote it down
    tally: Mapping[str, Any] = field(default_factory=dict)  # of a step's named losses
    extra: Mapping[str, Any] = field(default_factory=dict)  # what modules add to their state
    python: Mapping[str, Any] = field(default_factory=dict)  # what is kept elsewhere, packed


RECORDER = struct.Struct("qqqq")
"""Shared memory of a worker and the study's process. The worker says whose code runs (computing,
stepping on the host), and counts what it got done: units, copies and host steps; a count that
stands still is a hang. The study's process says of how many ``Happened`` the record is safe."""

# Orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure:
    """The first order: the device, the recipe (cloudpickle), and the study's settings.

    ``path`` is where the study's process imports from, so that the worker finds the same;
    ``kernels`` are those that it would train with.

    ``serial`` comes back with every reply, so that what was said to an earlier study is
    not taken for an answer to this one.
    """

    serial: int
    device: DeviceSpec
    recipe: bytes
    settings: Settings
    path: tuple[str, ...]
    kernels: KernelChoice


@dataclass(frozen=True, slots=True)
class Describe:
    """Say what shape each trial's model and batches have; ``arrays``: also which are alike enough
    to share an array; ``shapes``: also what each makes."""

    trials: tuple[TrialSpec, ...]
    arrays: bool = False
    shapes: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """What a trial makes: of which kind its optimizer is, by what that keeps, shape and type of
    each parameter and buffer, and which parameters are ``trained``."""

    optimizer: str
    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    trained: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure a trial's model unsharded, and its layers if it can be cut.

    ``narrow``: find out which weights may travel as bfloat16, and measure with them too.
    ``halves``: measure each backward in two as well. ``captures``: time a captured pass.
    """

    trial: TrialSpec
    cut: bool
    narrow: bool = False
    halves: bool = False
    captures: bool = False


@dataclass(frozen=True, slots=True)
class MeasureReplica:
    """Measure one of ``width`` replicas of a trial's model, as DDP or FSDP2 has it."""

    trial: TrialSpec
    width: int
    shard: bool


@dataclass(frozen=True, slots=True)
class MeasureShards:
    """Measure the units of the measured trial's model cut at ``cuts``, as ``Measure`` does.

    ``by_shard``: find out, too, whether each may run all micro-batches of a step in one visit.
    ``apart``: and whether they may be in processes of their own.
    """

    trial: TrialSpec
    cuts: tuple[int, ...]
    narrow: bool = False
    halves: bool = False
    by_shard: bool = False
    apart: bool = False


@dataclass(frozen=True, slots=True)
class MeasureArray:
    """Build an array of so many of these trials, which are of one shape, to be timed.

    ``is_whole``: the device may have room for it; else it is not built, and what a trial alone
    takes is asked for. ``alone_fits``: it has room for that one. ``captures``: that one trains
    captured. ``varies``: their batches vary in length, and several are looked at. ``one_base``:
    what is frozen is the same in all of them, and is there once.
    """

    trials: tuple[TrialSpec, ...]
    width: int
    kind: PassKind = "eager"
    is_whole: bool = True
    alone_fits: bool = True
    captures: bool = False
    varies: bool = False
    one_base: bool = False

    @property
    def trial(self) -> TrialSpec:
        """The one whose measure it is."""
        return self.trials[0]


@dataclass(frozen=True, slots=True)
class MeasureArrayShards:
    """Measure the units of an array of so many of these trials, cut at ``cuts``.

    ``num_layers``: of the trial alone whose layers are meant. ``one_base``: what is frozen is the
    same in all of them, and the array has it once. ``varies``: their batches vary in length, and
    of several the longest is taken.
    """

    trials: tuple[TrialSpec, ...]
    width: int
    cuts: tuple[int, ...]
    num_layers: int
    one_base: bool = False
    varies: bool = False

    @property
    def trial(self) -> TrialSpec:
        """The one whose measure it is."""
        return self.trials[0]


@dataclass(frozen=True, slots=True)
class TimeArray:
    """Time the array that was built, and a trial alone: for so many rounds, each in slices.

    ``slices_s``: seconds of each contender's (``TimedArray``). One of 0 is left out, and a long
    one is in the first round alone. All workers begin at ``begin`` of ``time.monotonic``, the
    clock of all processes here. Of no rounds: it is not to be timed, and makes room for trials.
    """

    trial: TrialSpec
    begin: float
    slices_s: tuple[float, ...]
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A lease begins: admit the trial and run it to step ``until``.

    The host region's descriptor travels with this order. ``progress`` is None for a
    trial that has not run; then the worker builds it and fills the region. Of a trial in stages
    every one of its workers gets a grant, with a socket to each of the others, in their order;
    what follows goes to stage 0 alone. ``rule`` is the plan's: who goes first on the device.
    """

    job: Job
    layout: TrialLayout
    progress: Progress | None
    until: int | None
    restore: str = ""  # a generation to take the state from
    save_in_s: float = 0.0  # when its next generation is due
    warm: bool = False  # the generation is a parent's: keep this trial's own hyperparameters
    stage: int = 0
    rule: str = DEFAULT


@dataclass(frozen=True, slots=True)
class Extend:
    """The lease goes on to step ``until``."""

    trial: int
    until: int | None


@dataclass(frozen=True, slots=True)
class Stop:
    """Forget the trial, whatever it is at; it went on elsewhere."""

    trial: int


@dataclass(frozen=True, slots=True)
class Park:
    """End the trial's lease at its next step boundary; a Grant that still waits is returned."""

    trial: int


@dataclass(frozen=True, slots=True)
class Save:
    """Write a generation of a trial that is parked here."""

    trial: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """No more orders: end."""


OfOneTrial = (
    Measure | MeasureShards | MeasureReplica | MeasureArray | MeasureArrayShards | TimeArray
)
"""Orders that train nothing, about one trial."""

Order = Configure | Describe | OfOneTrial | Grant | Extend | Park | Save | Stop | Shutdown

# Replies


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has imported everything and opened its device."""

    pid: int


@dataclass(frozen=True, slots=True)
class Opened:
    """The worker has opened its GPU for a study, and libraries keep so much of it for good."""

    library_bytes: Bytes


@dataclass(frozen=True, slots=True)
class Pace:
    """What a schedule of torch's counts its steps by: ``option`` is ``count``, of milestones the
    last one. ``gamma``: what the rate is multiplied by then, if it is."""

    kind: str
    option: str
    count: float
    gamma: float | None = None


@dataclass(frozen=True, slots=True)
class Noticed:
    """What may not be meant: of a trial's hyperparameters those that no code reads, and what code
    asked for in vain; whether there are batches to validate with; and what schedules count."""

    unread: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()
    validates: bool = True
    globals: Mapping[str, str] = field(default_factory=dict)  # that its step finds, once made
    shared: frozenset[str] = frozenset()  # those of them that are not a trial's own
    paces: tuple[Pace, ...] = ()
    batches: int | None = None  # of an epoch, where that is known
    state_bytes: int = 0  # of its parameters, gradients and optimizer state, or less
    made: Made | None = None  # where it was asked for
    data_reads: frozenset[str] = frozenset()  # hyperparameters that its data was made of
    frozen_bytes: int = 0  # of its parameters that stay as they are built, if enough for a file
    frozen: str = ""  # a digest of them, where the model was built with memory
    base: Base = NO_BASE  # of those that an array may have once, where it was


@dataclass(frozen=True, slots=True)
class Described:
    """A signature per trial: equal signatures cost the same. Errors by trial number.

    ``batches``: kinds of trials' batches where arrays were asked for (``matching/lengths.py``).
    ``left``: what of the study's process the worker's modules have as their import makes it.
    """

    signatures: Mapping[int, str]
    errors: Mapping[int, str]
    cause: Exception | None = None  # the first, when it is shoal's own
    arrays: Mapping[int, Signature] = field(default_factory=dict)  # where they were asked for
    constants: Mapping[int, str] = field(default_factory=dict)  # floats of the code, as a digest
    noticed: Mapping[int, Noticed] = field(default_factory=dict)
    batches: Mapping[int, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """The answer to Measure and MeasureShards."""

    trial: int
    measure: JobMeasure
    layout: TrialLayout | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayTry:
    """An array that was built; as in ``WidthMeasure`` and ``ArrayMeasure``.

    ``declined``: why there is none; ``is_kind``: other ways to run passes may do. ``is_over``: the
    device has no room for it, and only a trial alone is there to be timed, if that.
    ``once_s``: seconds of each contender (``TimedArray``), roughly; 0 if there is none. A
    step's are of ``steps`` of them, one after another. ``passes``: of a step, one for each of the
    ``lengths``. ``looped``: parts that run slot by slot since slots decided otherwise in them.
    """

    declined: str = ""
    is_kind: bool = False
    is_over: bool = False
    unit_bytes: Bytes = NO_BYTES
    pool_bytes: Bytes = NO_BYTES
    overlaps: bool = False
    evaluates_each: bool = False
    build_s: Seconds = NO_SECONDS
    refill_s: Seconds = NO_SECONDS
    once_s: tuple[float, ...] = ()
    valid_batches: int = 0
    notes: tuple[str, ...] = ()
    nodes: int = 0
    compiler: str = ""
    steps: int = 1
    passes: float = 1.0
    lengths: str = ""
    looped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredArray:
    """The answer to MeasureArray."""

    trial: int
    found: ArrayTry


@dataclass(frozen=True, slots=True)
class MeasuredArrayShards:
    """The shards of an array; ``declined``: why it cannot be run in shards, if it cannot.

    ``is_over``: a unit needs more than the device has, and smaller shards may do.
    ``build_s``: what it takes to cut the model. ``passes``: of each micro-batch on average, one
    for each length among its batches, which are ``lengths`` in words. ``batch_bytes``: of the
    batches that were measured, one for each slot. ``looped`` as of ``ArrayTry``.
    """

    trial: int
    shards: tuple[ShardSpec, ...] = ()
    declined: str = ""
    is_over: bool = False
    build_s: Seconds = NO_SECONDS
    passes: float = 1.0
    lengths: str = ""
    batch_bytes: Bytes = NO_BYTES
    looped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TimedArray:
    """The answer to TimeArray: for each round, seconds of a step alone and of the array, and of
    a validation batch alone and of the array; 0 where one was left out."""

    trial: int
    rounds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """An order about one trial could not be done; the traceback, and the error itself."""

    trial: int
    error: str
    cause: Exception | None


@dataclass(frozen=True, slots=True)
class LeaseOver:
    """The lease's last step is done and the trial's state is in the host store.

    ``ended``: it was the trial's last; ``checkpoint`` is its final generation, relative to
    the study, or empty with the ``trouble`` that kept it from being written.
    """

    trial: int
    progress: Progress
    ended: bool
    checkpoint: str = ""
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The answer to Stop: what was said of the trial before this is of a stay that is over."""

    trial: int


@dataclass(frozen=True, slots=True)
class Returned:
    """A Grant that waited for room was parked before it began."""

    trial: int


@dataclass(frozen=True, slots=True)
class Saved:
    """The answer to Save: the step of the newest generation, and why it is not newer."""

    trial: int
    step: int
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Happened:
    """Events since the last message, in order: a step of a millisecond sends none of its own."""

    packed: tuple[Packed, ...]

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(map(unpack_event, self.packed))


@dataclass(frozen=True, slots=True)
class Broken:
    """The worker itself cannot go on; its traceback."""

    error: str
    cause: Exception | None = None  # when it is shoal's own


Reply = (
    Ready
    | Opened
    | Described
    | Measured
    | MeasuredArray
    | MeasuredArrayShards
    | TimedArray
    | Refused
    | LeaseOver
    | Forgotten
    | Returned
    | Saved
    | Broken
    | Happened
)
