"""What is asked for: trials, devices, and what a model was measured to cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.core.errors import SpecError
from shoal.core.profile import Profile, as_profile
from shoal.core.units import Bytes, Seconds

NO_BYTES = Bytes(0)
NO_SECONDS = Seconds(0.0)
CAPTURED_LAYOUTS = 4
"""Layouts of batches whose passes are captured, each with memory of its own on a GPU."""
ALIGNMENT = 512  # bytes of every tensor in a flat store or slot, as device allocators give it
Scalar = bool | int | float | str | None
DeviceKind = Literal["virtual", "cuda"]
Place = Literal["device", "host"]
PassKind = Literal["eager", "traced", "compiled", "branches"]
"""How an array's pass runs: the model's code each time, a graph of it, or compiled code, each on
stacked tensors; or every slot's own pass, captured, on a GPU as parallel branches."""
Transfer = Literal["bf16", "fp32"]
"""How weights travel that autocast casts: as the bfloat16 it makes of them, or as they are."""
Master = Literal["split", "float32"]
"""How the host keeps the float32 of those: as that bfloat16 and what it lacks, or as it is."""
Order = Literal["micro", "shard"]
"""Which loop of a spilled step is outside: over micro-batches, as in the plain loop, or shards."""


_OF_GPUS = frozenset(("library_bytes", "share_bytes", "workspace_bytes"))


def record_of(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """For ``asdict``: fields by name, without those that GPUs alone have where they are 0."""
    return {name: value for name, value in fields if value or name not in _OF_GPUS}


class HyperParameters(Mapping[str, Scalar]):
    """A read-only mapping of one trial's hyperparameters.

    Raises:
        SpecError: a name that the search space does not have; lists the known ones.
    """

    def __init__(self, values: Mapping[str, Scalar]) -> None:
        self._values: Mapping[str, Scalar] = dict(values)

    def __getitem__(self, name: str) -> Scalar:
        try:
            return self._values[name]
        except KeyError:
            raise self._unknown(name) from None

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # somebody looks for a method, or copies this
            raise AttributeError(name)
        words = f"hyperparameters have no attribute {name!r}; they are read as hp[{name!r}]"
        raise AttributeError(words)

    def __repr__(self) -> str:
        return repr(self._values)

    def __reduce__(self) -> tuple[Any, ...]:
        return HyperParameters, (self._values,)

    def _unknown(self, name: str) -> SpecError:
        known = ", ".join(map(repr, self._values)) or "none"
        return SpecError(
            f"unknown hyperparameter {name!r}; this trial has {known}. Add it to the study's "
            f"space, or read it with hp.get({name!r}, default) if not all trials have it (when=)."
        )


def varying_names(settings: Iterable[Mapping[str, Scalar]]) -> list[str]:
    """The hyperparameters that tell trials apart, in the space's order; all of one trial's."""
    rows = list(settings)
    names = list(dict.fromkeys(name for row in rows for name in row))
    if len(rows) < 2:
        return names
    return [name for name in names if len({repr(row.get(name)) for row in rows}) > 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """One training run: a number, its hyperparameters and its seed.

    A clone has a ``parent``; a ``warm`` one begins from its parent's saved state.
    """

    number: int
    hp: Mapping[str, Scalar]
    seed: int
    parent: int | None = None
    warm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One device a worker drives: a CUDA GPU, or a CPU worker with an enforced byte budget.

    ``poison`` fills freed slots with NaN and delays copies at random, so that a
    missing wait becomes a red test. ``link_bytes_per_s`` makes copies of a virtual
    device take the time of a real link; None copies at memory speed. ``profile`` makes
    all that a virtual device does take the time of a real one: links, host memory and
    kernels; one read back from JSON may be given as the mapping that it was written as.
    ``library_bytes`` of the memory are what libraries keep of a GPU for good, where that is known.
    A GPU that several workers share is a device for each, ``cuda:0/0`` and ``cuda:0/1``, with a
    part of its memory: no worker gets more than ``share_bytes`` there, whatever for.
    """

    name: str
    kind: DeviceKind
    memory: Bytes
    threads: int = 1
    poison: bool = False
    link_bytes_per_s: float | None = None
    profile: Profile | None = None
    library_bytes: Bytes = NO_BYTES
    share_bytes: Bytes = NO_BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", as_profile(self.profile))

    @property
    def torch_name(self) -> str:
        """What torch calls a GPU."""
        return self.name.partition("/")[0]

    @property
    def for_trials(self) -> Bytes:
        """The memory that trials may have."""
        return Bytes(max(0, self.memory - self.library_bytes))


def shared_gpus(devices: Iterable[DeviceSpec]) -> list[str]:
    """The GPUs that several of these devices are parts of."""
    names = Counter(device.torch_name for device in devices if device.kind == "cuda")
    return [name for name, count in names.items() if count > 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow:
    """What of a layer or shard is another number when the weights that autocast casts travel
    as bfloat16, and the device has no more of them than that.

    ``gradient_bytes`` are in bfloat16 too where a step has one micro-batch: the cast's gradient
    is, and nothing is added to it. The others are as in ``ShardSpec``.
    """

    parameter_bytes: Bytes  # without borrowed ones, which travel as they are
    gradient_bytes: Bytes
    forward_peak_bytes: Bytes
    backward_peak_bytes: Bytes
    saved_bytes: Bytes
    saved_output_bytes: Bytes
    saving_peak_bytes: Bytes
    forward_s: Seconds
    backward_s: Seconds
    step_s: Seconds = NO_SECONDS
    movable_bytes: Bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """What a backward in two needs and takes: of inputs first, of parameters later.

    ``left_bytes`` are what the first half leaves for the second, of what was allocated from the
    forward on. Where the second reads of what entered it ``keeps_boundary``, and ``keeps_carry``
    where it reads gradients that came from the layers after: then all that came with these waits
    too. Peaks are inside each half, while the parameters have gradients; the first includes what
    the forward saved. Where they have none the second has ``making_peak_bytes``, with those it
    makes. ``first_s`` includes a forward, as ``backward_s`` does. A backward that cannot be cut in
    two is all in its first half, and leaves nothing.
    """

    left_bytes: Bytes
    keeps_boundary: bool
    keeps_carry: bool
    first_peak_bytes: Bytes
    second_peak_bytes: Bytes
    making_peak_bytes: Bytes
    first_s: Seconds = NO_SECONDS
    second_s: Seconds = NO_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMeasure:
    """What one layer of a chain costs, measured on a real batch.

    Layer 0 is the prologue, the last one the epilogue with the loss; the others
    are the blocks. Bytes are of one micro-batch.
    """

    name: str
    parameter_bytes: Bytes  # owned parameters, each aligned as in the flat store
    state_bytes: Bytes  # element-wise optimizer state of the owned parameters, aligned
    borrowed_bytes: Bytes  # tied parameters owned by an earlier layer
    boundary_bytes: Bytes  # new tensors that leave this layer towards later ones
    carry_bytes: Bytes  # gradients that enter this layer's boundary on the way back
    forward_peak_bytes: Bytes  # allocated inside a forward under no_grad, outputs included
    saved_bytes: Bytes  # kept for the backward by a forward with gradients
    backward_peak_bytes: Bytes  # peak inside forward with gradients + backward, gradients included
    forward_s: Seconds
    backward_s: Seconds  # recompute and backward
    step_s: Seconds
    private_bytes: Bytes = NO_BYTES  # what enters this layer and no later one reads
    stash_bytes: Bytes = NO_BYTES  # what its forward changes, as its recompute must find it
    cut_after: bool = True  # may a shard end here?
    reason: str = ""  # why not
    gradient_bytes: Bytes | None = None  # of those that are trained; None: as the parameters
    frozen: bool = False  # nothing in it or before it is trained: no backward comes to it
    narrow: Narrow | None = None
    halves: Halves | None = None  # where they were measured

    @property
    def trained_bytes(self) -> Bytes:
        """Of its parameters those that have gradients."""
        return self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """One contiguous piece of a chain, and the exact bytes and seconds of its units.

    ``layers`` is the half-open range of chain layers. ``boundary_bytes`` are the
    tensors that enter this shard from the one before (0 for the first), held from
    that forward until this shard's backward. ``carry_bytes`` are the gradients its
    backward hands to the shard before, tied weights' included. ``private_bytes`` is the part
    of ``boundary_bytes`` that no other shard reads, so that it can wait on the host.
    ``saved_bytes`` are what a forward with gradients leaves for its backward, None where the
    shard must recompute; ``saved_output_bytes`` of them are the next shard's boundary, and
    ``saving_peak_bytes`` is the peak inside of that forward. ``movable_bytes`` of what it saved
    can wait on the host, None where nothing may: ``why_not_movable``. ``stash_bytes`` are buffers
    and parameters that a forward changes, as they were, kept for the recompute. ``narrow`` is what
    differs if its weights travel as bfloat16, None where they cannot; a job's shards have it
    worked in (``as_they_travel``), and so is the head: ``head_bytes`` of its parameters, or
    where those stay of its state, stay on the device from step to step. ``halves`` is its
    backward in two, None where that was not measured. ``step_chunks`` are the bytes of its
    parameters that a step on the host takes at a time, () where it takes all at once.
    ``workspace_bytes`` of a unit's peak, at most, are scratch memory of its kernels, as far as the
    device's allocator tells it. Nothing goes backward through one that is ``frozen``: nothing in
    it or before it is trained.
    """

    index: int
    layers: tuple[int, int]
    parameter_bytes: Bytes  # loaded for a unit: owned and borrowed, aligned
    owned_bytes: Bytes  # the part of them that this shard steps
    state_bytes: Bytes
    gradient_bytes: Bytes
    boundary_bytes: Bytes
    carry_bytes: Bytes
    forward_peak_bytes: Bytes
    backward_peak_bytes: Bytes
    step_peak_bytes: Bytes
    forward_s: Seconds = NO_SECONDS
    backward_s: Seconds = NO_SECONDS
    step_s: Seconds = NO_SECONDS
    private_bytes: Bytes = NO_BYTES
    saved_bytes: Bytes | None = None
    saved_output_bytes: Bytes = NO_BYTES
    saving_peak_bytes: Bytes = NO_BYTES
    movable_bytes: Bytes | None = None
    why_not_movable: str = ""
    stash_bytes: Bytes = NO_BYTES
    narrow: Narrow | None = None
    head_bytes: Bytes = NO_BYTES
    head_of_state: bool = False
    step_chunks: tuple[Bytes, ...] = ()
    halves: Halves | None = None
    workspace_bytes: Bytes = NO_BYTES
    frozen: bool = False

    @property
    def step_bytes(self) -> Bytes:
        """What an element-wise optimizer reads and writes for its step.

        Parameters and state are read and written, gradients read: 28 bytes a parameter for
        AdamW in float32.
        """
        return Bytes(2 * self.owned_bytes + self.gradient_bytes + 2 * self.state_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthMeasure:
    """An array of ``width`` trials whose passes run in one way, and one of them alone beside it.

    Seconds of a step and of a validation batch, of all slots together; all devices of the study
    were at it at once, and it is the slowest one's. ``alone_s`` and ``alone_valid_s`` are of one
    trial in the same rounds. ``build_s`` is what the array costs until it steps as measured, with
    its graph and its compiling, and ``refill_s`` what it costs that a slot gets another trial.
    ``noise`` is by what part rounds differed. ``declined``: why there is no such array. One
    that is spilled has ``shards``, moves ``moved_bytes`` a step, and its ``step_s`` is worked out.
    ``is_over``: the device has no room for it, and it has no seconds of its own. ``pool_bytes``
    are kept between steps, beside what the trials hold: graphs on a GPU have memory of their own.
    ``evaluates_each``: slots are evaluated one by one, and those that are not cost nothing.
    ``passes``: of a step, on average: one for each length of its slots' batches, whose sizes
    ``lengths`` tells, where they vary. ``looped``: the parts that run slot by slot since slots
    decided otherwise in them by their data.
    """

    width: int
    kind: PassKind = "eager"
    step_s: Seconds = NO_SECONDS
    unit_bytes: Bytes = NO_BYTES
    pool_bytes: Bytes = NO_BYTES
    valid_s: Seconds = NO_SECONDS
    alone_s: Seconds = NO_SECONDS
    alone_valid_s: Seconds = NO_SECONDS
    build_s: Seconds = NO_SECONDS
    refill_s: Seconds = NO_SECONDS
    noise: float = 0.0
    declined: str = ""
    shards: int = 0
    moved_bytes: Bytes = NO_BYTES
    is_over: bool = False
    evaluates_each: bool = False
    passes: float = 1.0
    lengths: str = ""
    looped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayMeasure:
    """What trials of one shape take as arrays, each beside one of them alone.

    ``declined`` says in words why they can be no array; empty if they can. ``notes`` say what runs
    slot by slot. ``valid_batches`` are those of one evaluation, ``took_s`` what measuring took,
    ``first_s`` what of that the first candidate did, with the comparison of array and trials, and
    ``last_s`` what the last one did.
    ``compiler``: what compiles here; ``nodes``: operations of a step's graph. ``overlaps``: the
    device may run slots' own passes side by side.
    """

    declined: str = ""
    widths: tuple[WidthMeasure, ...] = ()
    notes: tuple[str, ...] = ()
    valid_batches: int = 0
    took_s: Seconds = NO_SECONDS
    first_s: Seconds = NO_SECONDS
    last_s: Seconds = NO_SECONDS
    compiler: str = ""
    nodes: int = 0
    overlaps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMeasure:
    """What one of ``width`` replicas costs, of the first batch's rows, and what was compared.

    ``held_bytes`` are there between steps, ``unit_bytes`` come inside a step or an evaluation.
    ``whole_loss`` is that of the first batch, in evaluation mode, and ``pieces_loss`` the mean of
    its pieces', weighted by rows; None where it cannot be computed so. ``problem`` says why the
    model cannot be divided over devices, if it cannot. ``steps_alike``: stepping shards of
    parameters gives the bits of stepping them whole. ``blocks`` are gathered one after another.
    ``freezes``: the schedule's code may have parameters trained that were not, or the other way.
    """

    shard: ShardSpec
    held_bytes: Bytes
    unit_bytes: Bytes
    whole_loss: float | None
    pieces_loss: float | None
    problem: str
    steps_alike: bool
    blocks: int
    freezes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureMeasure:
    """What a training pass takes eagerly and captured, turn by turn; seconds.

    ``make_s`` is what capturing it took, with the passes that it was compared with. ``noise`` is
    by what part rounds differed. ``declined`` says why it cannot be captured.
    """

    eager_s: Seconds = NO_SECONDS
    captured_s: Seconds = NO_SECONDS
    make_s: Seconds = NO_SECONDS
    noise: float = 0.0
    declined: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMeasure:
    """A model as a worker measured it: what a plan is decided from.

    ``shards`` are exact for the cut that was chosen; ``layers`` are what the cut
    was chosen from. ``notes`` say in words what was found: why a model cannot be
    cut, what was switched off, what the pilot compared. ``in_turn`` is why the micro-batches of
    a step have to go through it one after another, where shards were rehearsed in both orders.
    """

    layers: tuple[LayerMeasure, ...]
    shards: tuple[ShardSpec, ...]
    batch_bytes: Bytes
    buffer_bytes: Bytes
    resident_bytes: Bytes  # peak of an unsharded step: everything on the device
    num_batches: int | None  # of one epoch, where the data knows
    valid_scale: float  # bytes of a validation batch over those of a training batch
    optimizer: str  # its class, and which implementation
    cuttable: bool
    bitwise: bool  # was the chain compared with the module, and equal bit for bit?
    notes: tuple[str, ...] = field(default=())
    data: str = ""  # how the trial finds its place in the data again
    read_s: Seconds = NO_SECONDS  # of a batch, where no other process reads ahead
    loader_bytes: Bytes = NO_BYTES  # of batches that loader processes hold in host memory
    draws: bool = True  # whether the model draws random numbers while it trains
    foretold: bool = False  # whether how many it draws follows from the form of its batch
    draw_bytes: Bytes = NO_BYTES  # inside of drawing those of a batch again, where it is foretold
    draws_evaluating: bool = False  # and while it, or a metric, is evaluated
    writes_evaluating: bool = False  # whether its buffers change while it is evaluated
    link: tuple[float, float] | None = None  # bytes per second up and down, just measured
    narrow: tuple[str, ...] = ()  # parameters that only autocast's cast reads
    compiled: int = 0  # modules that torch.compile has compiled
    rows: int | None = None  # of the batch, where all its tensors have as many
    replica: ReplicaMeasure | None = None  # of what was asked for
    capture: CaptureMeasure | None = None  # where it was asked for
    trained: tuple[str, ...] = ()  # parameters
    written: tuple[str, ...] = ()  # parameters that a forward writes to
    steps_by_tensor: bool = False  # its tensors may step one after another: the bits are the same
    lost: tuple[str, ...] = ()  # what a step changed in Python, and no checkpoint can hold
    in_turn: str = ""  # empty where nothing was found against another order, or none was tried
    beside: int | None = None  # a shard that reads what earlier ones leave beside what they return
