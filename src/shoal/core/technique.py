"""Techniques: how a trial runs on its devices, as asked for or as planned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from shoal.core.errors import SpecError
from shoal.core.shardnames import ahead, is_pair, layers, named_shards, number_of_shards
from shoal.core.spec import Master, Order, Place, ShardSpec, Transfer
from shoal.core.units import Bytes, counted
from shoal.core.values import flag, one_of, optional_flag, optional_whole, plain, whole

Head = tuple[int, int]
"""A shard, and how many bytes of it stay."""


@dataclass(frozen=True, slots=True)
class Resident:
    """The whole model stays on the device; nothing moves inside a step."""


@dataclass(frozen=True, slots=True)
class Captured(Resident):
    """As ``Resident``, with each training pass run without the Python code that it comes from.

    Forward and backward are seen once and run again from then on: on a CPU as a list of torch's
    operations, on a GPU as one CUDA graph. They are the eager pass's own kernels, so the bits are
    those of ``Resident``, which is looked at before a capture is trusted: whether a trial is
    captured is no part of its numerics key. A pass that cannot be captured (its data decides
    what is computed, a module has hooks, its code counts its calls) runs as in ``Resident``, with
    a warning that says why; so do evaluations.
    """


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
    whole tensors from the first on; or several such pairs, of late state the largest ones.
    ``order`` "shard" has a shard run all micro-batches of a step while it is on the device, which
    gives the same bits where no two layers share, or read from each other, what a forward changes
    (a BatchNorm used twice): where you ask for it, that is yours to know, and ``shoal verify`` is
    the proof. What a micro-batch draws at random is drawn ahead, so that the next one begins where
    it would; a model for which that cannot be done (it draws from Python's or NumPy's generator,
    or is compiled) is refused, and a trial whose draws turn out to depend on what it computes
    fails before it steps. "micro" has micro-batches go through the model one after another; None
    is the quicker one, "shard" only after two batches went both ways and ended on the same bits.
    ``boundaries`` is where a shard's input waits between
    its forward and its backward, None for wherever there is room: on the host where the device
    has none, or where that room is better used. ``keep_turn`` is how many shards more, those next
    to the turn from forward to backward, hold their parameters from one to the other, None for as
    many as fit; it goes with the step on the host. If it is as many as travel, all of them come
    into memory of their own, and there are no slots. ``keep_gradients`` goes with the step on the
    device: of how many shards, the first ones that are not kept, the gradients stay there while
    they wait, for clipping or for more micro-batches; None for as many as fit. ``late_state``
    has the state of shards in ``keep_weights`` come into memory that is there from the first
    such load to the end of the step, None where that moves less; with clipping it always does.
    ``recompute`` True runs every shard's forward
    again before its backward; "auto" leaves that out where that is quicker, False wherever it can
    be left out. What the forward saved stays on the device meanwhile, of the shards named in
    ``keep_activations`` if that is not None, which are shards whose parameters stay there; or it
    waits on the host, of those in ``spill_activations`` if that is not None, all but the
    last two. ``transfer`` "bf16" has weights travel as the
    bfloat16 that autocast makes of them, where nothing else reads them: half the bytes and the
    same bits, with the step on the host; None does so where it can, "fp32" never. A forward that
    reads such a weight otherwise than the measured one has its trial planned again, with whole
    weights, from its newest generation. Shards that stay are whole either way. ``master`` is how
    the host keeps the float32 of weights that travel as bfloat16: "float32" as it is, beside the
    bfloat16; "split" as the bfloat16 that is loaded and the 17 bits that this lacks. With Adam's
    state and gradients that is 14.1 bytes a parameter instead of 16, and a step puts the weight
    together and takes it apart again, with the same bits. None takes "split" where the host's
    memory is too small otherwise. ``offload`` "disk" has the study's trials at home in files that
    are mapped (``Hardware(spill_dir=...)``, else in the study's directory), not in the host's
    memory: what of them is there, the kernel decides.
    """

    shards: int | None = None
    optimizer: Place | None = None
    lookahead: int | None = None
    lookbehind: int | None = None
    keep: tuple[int, ...] | None = None
    keep_weights: tuple[int, ...] = ()
    keep_head: Head | tuple[Head, ...] | None = None
    keep_turn: int | None = None
    keep_gradients: int | None = None
    late_state: bool | None = None
    order: Order | None = None
    boundaries: Place | None = None
    transfer: Transfer | None = None
    master: Master | None = None
    offload: str = "host"
    recompute: bool | str = "auto"
    keep_activations: tuple[int, ...] | None = None
    spill_activations: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _set(self, "shards", optional_whole("Spilled(shards=...)", self.shards, 1))
        _check_words(self, _SPILLED_WORDS)
        _set(self, "lookahead", ahead("lookahead", self.lookahead, 2))
        _set(self, "lookbehind", ahead("lookbehind", self.lookbehind, 1))
        self._check_turn()
        self._check_gradients()
        self._check_late()
        self._check_head()
        self._check_master()
        if self.transfer == "bf16" and (self.optimizer == "device" or self.keep_weights):
            raise SpecError(
                "transfer='bf16' with the step on the device, which needs the weights whole. "
                "Step on the host, or leave transfer= out."
            )
        if self.keep_weights and self.keep is None:
            _set(self, "keep", ())
        if self.keep_weights and self.optimizer is None:
            _set(self, "optimizer", "device")
        if self.keep is not None:
            self._check_keep("keep", self.keep)
        self._check_keep("keep_weights", self.keep_weights)
        if self.keep_weights and self.optimizer == "host":
            raise SpecError(
                f"keep_weights={self.keep_weights} with the step on the host: the copies on the "
                "device would be old after each step. Name the shards in keep=, or step on the "
                "device."
            )
        one_of("offload", self.offload, ("host", "disk"))
        self._check_recompute()

    def _check_turn(self) -> None:
        count = number_of_shards("keep_turn", self.keep_turn)
        _set(self, "keep_turn", count)
        if count and self.optimizer is None:
            _set(self, "optimizer", "host")
        if count and self.optimizer == "device":
            raise SpecError(
                f"keep_turn={count} with the step on the device: what room there is has better "
                "uses there. Name shards in keep_weights=, or step on the host."
            )

    def _check_gradients(self) -> None:
        count = number_of_shards("keep_gradients", self.keep_gradients)
        _set(self, "keep_gradients", count)
        if count and self.optimizer is None:
            _set(self, "optimizer", "device")
        if count and self.optimizer == "host":
            raise SpecError(
                f"keep_gradients={count} with the step on the host, where the gradients go. Leave "
                "it out, or step on the device."
            )

    def _check_late(self) -> None:
        _set(self, "late_state", optional_flag("late_state", self.late_state))
        if self.late_state and self.optimizer is None:
            _set(self, "optimizer", "device")
        if self.late_state and self.optimizer == "host":
            raise SpecError(
                "late_state=True with the step on the host, where the state is. Leave it out, or "
                "step on the device."
            )

    def _check_head(self) -> None:
        if self.keep_head is None:
            return
        given: Any = self.keep_head
        heads = [given] if is_pair(given) else given
        is_list = isinstance(heads, tuple | list) and all(map(is_pair, heads))
        if not is_list or not heads:
            raise SpecError(
                f"keep_head is a shard and a number of bytes, as in (2, 65536), or several of "
                f"these pairs, got {given!r}"
            )
        pairs = tuple((plain(shard), plain(num_bytes)) for shard, num_bytes in heads)
        _set(self, "keep_head", pairs if len(pairs) > 1 else pairs[0])
        if self.keep is None:
            _set(self, "keep", ())
        if self.optimizer != "device":
            raise SpecError(
                f"keep_head={self.keep_head} without the step on the device: it would be old "
                "after each step. Add optimizer='device', or leave it out."
            )
        can_be = set(range(self.shards or 0)) - set(self.keep or ())
        named = {shard for shard, num_bytes in pairs if num_bytes >= 1 and shard in can_be}
        if len(named) < len(pairs):
            raise SpecError(
                f"keep_head={self.keep_head} names a shard that is not in keep={self.keep}, of "
                f"shards={self.shards}, and at least one byte of it, each shard once. Leave it "
                "out to keep what fits."
            )

    def _check_master(self) -> None:
        if self.master != "split":
            return
        if self.transfer == "fp32" or self.optimizer == "device" or self.keep_weights:
            what = "transfer='fp32'" if self.transfer == "fp32" else "the step on the device"
            raise SpecError(
                f"master='split' with {what}: what is split is the float32 of weights that travel "
                "as bfloat16 to a step on the host. Step there with transfer='bf16', or leave "
                "master= out."
            )
        _set(self, "transfer", "bf16")

    def _check_recompute(self) -> None:
        names = ("keep_activations", "spill_activations")
        if not isinstance(self.recompute, str):
            _set(self, "recompute", plain(self.recompute))
        if self.recompute != "auto" and type(self.recompute) is not bool:
            raise SpecError(f"recompute is True, False or 'auto', got {self.recompute!r}.")
        for name in names:
            named = getattr(self, name)
            if self.recompute is True and named:
                raise SpecError(
                    f"recompute=True recomputes every shard, and {name}={named} names some that "
                    "shall not. Leave one of them out."
                )
            if self.recompute is True:
                _set(self, name, ())
            elif named is not None:
                self._check_keep(name, named)
        both = set(self.keep_activations or ()) & set(self.spill_activations or ())
        if both:
            raise SpecError(
                f"keep_activations={self.keep_activations} and spill_activations="
                f"{self.spill_activations} both name shard {min(both)}: what its forward saved "
                "either stays on the device or waits on the host. Name it once."
            )

    def _check_keep(self, name: str, shards: Iterable[int]) -> None:
        _set(self, name, named_shards(name, shards, self.shards, "Spilled"))


def asks_by_shard(technique: object) -> bool:
    """Whether shards are to run all micro-batches of a step in one visit."""
    return isinstance(technique, Spilled) and technique.order == "shard"


Schedule = Literal["naive", "gpipe", "flush", "zb-h1", "2bw"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
AHEAD: tuple[Schedule, ...] = ("flush", "2bw")
"""Those whose stages may run ahead (``lag``)."""
SPILLING: tuple[Schedule, ...] = ("naive", "gpipe", "flush")
"""Those whose stages may be made of shards that come and go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """The model is cut into stages, one on each of several devices; micro-batches flow through.

    ``stages`` is how many, None for the quickest of those that fit. ``schedule`` is when a stage
    computes which micro-batch: ``"naive"``, ``"gpipe"``, ``"flush"`` (1F1B), ``"zb-h1"`` and
    ``"2bw"``; all but the last end on the bits of training alone, ``"2bw"`` computes gradients
    with weights that are one step old, at every stage the same, and ``predict`` with a guess of
    the newer ones: other numerics. None is the quicker of ``"flush"`` and ``"zb-h1"``; where
    ``Recipe(stale=...)`` allows stale weights the one of these and ``"2bw"`` that is soonest at
    the loss. ``micro_batches`` is how many a
    step has: the recipe's ``accumulate`` batches, or a multiple of that where the recipe says
    ``splittable=True``: then each batch is cut into equal rows. ``cuts`` are the layers at which
    the later stages begin, None for the quickest slowest stage. ``recompute`` runs forwards again
    in the backward instead of keeping what they saved; None keeps it if there is room. ``lag`` is
    how many micro-batches more a stage of "flush" or "2bw" runs ahead, to hide slow messages: one
    less than there are stages hides those between all of them, fewer those of the last ones. None
    is that or 0, whichever is quicker.
    ``width`` is how many copies of the pipeline share a step's micro-batches, each on as many
    devices as there are stages. Every stage's gradients are added up over the copies, in their
    order, while others still compute: other numerics (``shoal.testing.plain_wide_loop``), which
    nothing chooses but you. ``micro_batches`` are those of all copies.

    A stage that does not fit its device is *spilled*: it is made of several shards, of which some
    are on the device at a time. ``shards`` is how many there are over all stages; None: stages
    stay whole where a cut fits, and else the planner says how many. The rest is as in ``Spilled``,
    of shards numbered over all stages: ``optimizer`` is where those that travel are stepped,
    ``lookahead`` how many units ahead they are loaded, ``keep`` which of them stay on their device
    and step there, None for as many as fit. ``keep_gradients`` has a stage's gradients wait on the
    device for the last micro-batch of a step, instead of going to the host and back; None if there
    is room. Shards that travel always run their forward again. With "naive" and "flush" a shard is
    loaded for each micro-batch; with "gpipe" it takes all of a step's in one visit, forwards and
    later backwards. For synchronous schedules with whole backwards: not "zb-h1", "2bw".
    """

    stages: int | None = None
    schedule: Schedule | None = None
    micro_batches: int | None = None
    cuts: tuple[int, ...] | None = None
    recompute: bool | None = None
    lag: int | None = None
    predict: bool = False
    width: int = 1
    shards: int | None = None
    optimizer: Place | None = None
    lookahead: int | None = None
    keep: tuple[int, ...] | None = None
    keep_gradients: bool | None = None

    def __post_init__(self) -> None:
        _check_words(self, {"schedule": SCHEDULES, "optimizer": PLACES})
        for name, least in (("stages", 2), ("micro_batches", 1), ("lag", 0), ("shards", 2)):
            count = optional_whole(f"Pipelined({name}=...)", getattr(self, name), least)
            _set(self, name, count)
        _set(self, "width", whole("Pipelined(width=...)", self.width, 1))
        _set(self, "predict", flag("Pipelined(predict=...)", self.predict))
        for name in ("recompute", "keep_gradients"):
            _set(self, name, optional_flag(f"Pipelined({name}=...)", getattr(self, name)))
        _set(self, "lookahead", ahead("lookahead", self.lookahead, 2))
        if self.predict and self.schedule != "2bw":
            raise SpecError(
                f"predict=True guesses the weights that stale gradients will meet; those of "
                f"{self.known_schedule!r} are not stale. Leave it out, or use schedule='2bw'."
            )
        if self.cuts is not None:
            cuts = layers(self.cuts)
            if self.stages is None:
                _set(self, "stages", len(cuts) + 1)
            if len(cuts) + 1 != self.stages or list(cuts) != sorted(set(cuts)):
                raise SpecError(
                    f"{self.stages} stages need {counted((self.stages or 1) - 1, 'cut')}, "
                    f"ascending; got {cuts}. Leave cuts= out to have them chosen."
                )
            _set(self, "cuts", cuts)
        self._check_shards()
        self._require_enough()
        self._require_use()

    def _require_enough(self) -> None:
        if self.micro_batches is None:
            return
        if self.micro_batches < self.width:
            raise SpecError(
                f"{self.width} copies of a pipeline need {self.width} micro-batches a step or "
                f"more, got micro_batches={self.micro_batches}. Ask for more of them, or for "
                "fewer copies."
            )
        if self.schedule == "2bw" and self.micro_batches < (self.stages or 0) * self.width:
            each = f" in each of {self.width} copies" if self.width > 1 else ""
            raise SpecError(
                f"2bw with {self.stages} stages{each} needs {(self.stages or 0) * self.width} "
                f"micro-batches a step or more, got micro_batches={self.micro_batches}. Ask for "
                "more of them, for fewer stages, or for schedule='flush'."
            )

    def _require_use(self) -> None:
        """What its schedule has no use for is not to be asked for.

        Raises:
            SpecError: it is.
        """
        if self.lag and self.known_schedule not in AHEAD:
            raise SpecError(
                f"lag={self.lag} with schedule={self.schedule!r}, whose stages do not run ahead. "
                "Leave it out, or use schedule='flush' or '2bw'."
            )

    def _check_shards(self) -> None:
        if self.shards is not None and self.shards < (self.stages or 0):
            raise SpecError(
                f"{self.stages} stages of {counted(self.shards, 'shard')}: every stage has one or "
                "more. Ask for fewer stages, or for more shards."
            )
        if self.keep is not None:
            _set(self, "keep", named_shards("keep", self.keep, self.shards))
        if self.is_spilled and self.width > 1:
            raise SpecError(
                f"width={self.width} with stages that are spilled: nothing brings the copies' "
                "gradients together while shards come and go yet. Use width=1, or leave out "
                "shards=, optimizer=, lookahead=, keep= and keep_gradients=."
            )
        if self.is_spilled and self.known_schedule not in SPILLING:
            named = ", ".join(map(repr, SPILLING))
            raise SpecError(
                f"schedule={self.schedule!r} with stages that are spilled: its "
                f"{'second weight version' if self.is_stale else 'half backwards'} would have to "
                f"travel too, and nothing holds that to its loop yet. Use one of {named}, or "
                "leave out shards=, optimizer=, lookahead=, keep= and keep_gradients=."
            )

    @property
    def known_schedule(self) -> Schedule:
        """Its schedule; "flush" where it was left open."""
        return self.schedule or "flush"

    @property
    def is_spilled(self) -> bool:
        """Whether its stages are made of shards that come and go, or have been asked to be."""
        asked = (self.shards, self.optimizer, self.lookahead, self.keep, self.keep_gradients)
        return any(value is not None for value in asked)

    @property
    def is_stale(self) -> bool:
        """Whether gradients are of weights that are one step old, and two versions are kept."""
        return self.schedule == "2bw"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """Replicas of the model, one on each of several devices; each trains on a part of every batch.

    ``width`` is how many, None for as many as there are devices, and rows in a batch. Each
    computes with its rows, and the gradients are added up: the step is that of the whole batch,
    but for the order of sums, as ``shoal.testing.plain_data_parallel_loop`` says. ``shard`` False
    is PyTorch's DDP: each device holds all of the model and steps it. True is FSDP2: parameters,
    gradients and optimizer state are divided over the devices, and each block's parameters are
    gathered while it computes. Batches are cut, so the recipe has to say ``splittable=True``.
    """

    width: int | None = None
    shard: bool = False

    def __post_init__(self) -> None:
        hint = "One device trains with technique='resident'."
        _set(self, "width", optional_whole("DataParallel(width=...)", self.width, 2, hint))
        hint = "False is DDP, True is FSDP2."
        _set(self, "shard", flag("DataParallel(shard=...)", self.shard, hint))


Technique = Resident | Spilled | Pipelined | DataParallel


def kept_shards(technique: Technique) -> tuple[int, ...]:
    """The shards that stay on the device between steps: of a resident model its only one."""
    if isinstance(technique, Resident):
        return (0,)
    return (technique.keep or ()) if isinstance(technique, Spilled | Pipelined) else ()


def steps_on_host(technique: Technique) -> bool:
    """Whether shards that travel are stepped on their host copies."""
    return isinstance(technique, Spilled | Pipelined) and technique.optimizer == "host"


def saving_shards(technique: Pipelined) -> tuple[int, ...]:
    """Of spilled stages the shards that keep what their forward saved: of those that stay."""
    last = (technique.shards or 0) - 1
    saves = () if technique.recompute else technique.keep or ()
    return tuple(shard for shard in saves if shard != last)


def spans_of(technique: Pipelined, shards: Sequence[ShardSpec]) -> tuple[tuple[int, int], ...]:
    """Per stage its shards, from the first to before the last; of stages that stay whole one."""
    if not technique.is_spilled:
        return tuple((shard, shard + 1) for shard in range(len(shards)))
    begins = [s.index for s in shards if s.layers[0] in (0, *(technique.cuts or ()))]
    return tuple(zip(begins, [*begins[1:], len(shards)], strict=True))


def kept_weights(technique: Technique) -> tuple[int, ...]:
    """Shards of which the parameters alone stay on the device between steps."""
    if not isinstance(technique, Spilled):
        return ()
    return tuple(s for s in technique.keep_weights if s not in kept_shards(technique))


def late_shards(technique: Technique) -> tuple[int, ...]:
    """Shards whose state comes into late slots where the norm is not waited for."""
    late = isinstance(technique, Spilled) and technique.late_state
    return kept_weights(technique) if late else ()


def kept_heads(technique: Technique) -> tuple[int, ...]:
    """Shards that travel, but for some of their tensors, which stay on the device."""
    return tuple(heads_of(technique))


def heads_of(technique: Technique) -> Mapping[int, int]:
    """Shard -> how many bytes of it stay, of those that travel."""
    if not isinstance(technique, Spilled) or technique.keep_head is None:
        return {}
    heads: Any = technique.keep_head  # one pair, or several
    return dict([heads] if is_pair(heads) else heads)


def turned_shards(technique: Technique, num_shards: int) -> tuple[int, ...]:
    """Shards that hold their parameters from forward to backward outside the slots.

    The last of those that travel, but for the ones that find theirs in a slot at the turn; all
    that travel where so many are asked for, the last one too, which is there for its backward.
    """
    if not isinstance(technique, Spilled) or not technique.keep_turn:
        return ()
    travel = _travelling(technique, num_shards)
    if technique.keep_turn >= len(travel):
        return travel
    return turnable_shards(technique, num_shards)[-technique.keep_turn :]


def turnable_shards(technique: Spilled, num_shards: int) -> tuple[int, ...]:
    """Those that travel and are not in a slot at the turn anyway."""
    return _travelling(technique, num_shards)[: -1 - (technique.lookahead or 0)]


def _travelling(technique: Spilled, num_shards: int) -> tuple[int, ...]:
    kept = kept_shards(technique)
    return tuple(shard for shard in range(num_shards) if shard not in kept)


def waiting_gradients(technique: Technique, num_shards: int) -> tuple[int, ...]:
    """Shards that are not kept and whose gradients wait on the device for their step."""
    if not isinstance(technique, Spilled) or not technique.keep_gradients:
        return ()
    return _travelling(technique, num_shards)[: technique.keep_gradients]


def travels_narrow(technique: Technique, shard: int) -> bool:
    """Whether weights of a shard that autocast alone reads travel as bfloat16."""
    if not isinstance(technique, Spilled) or technique.transfer != "bf16":
        return False
    return technique.optimizer == "host" and shard not in kept_shards(technique)


def has_split_master(technique: Technique) -> bool:
    """Whether the host keeps the float32 of weights that travel as bfloat16 in two parts."""
    return isinstance(technique, Spilled) and technique.master == "split"


def as_they_travel(shards: Sequence[ShardSpec], technique: Technique) -> tuple[ShardSpec, ...]:
    """The shards of a measure as a technique moves them; of a job's shards the same again."""
    return tuple(_as_it_travels(shard, technique) for shard in shards)


def _with_head(shard: ShardSpec, technique: Technique) -> ShardSpec:
    num_bytes = heads_of(technique).get(shard.index)
    if num_bytes is None:
        return shard
    of_state = shard.index in kept_weights(technique)
    return replace(shard, head_bytes=Bytes(num_bytes), head_of_state=of_state)


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
        movable_bytes=None if shard.movable_bytes is None else narrow.movable_bytes,
        forward_s=narrow.forward_s,
        backward_s=narrow.backward_s,
        step_s=narrow.step_s,
        narrow=None,
    )


PLACES: tuple[Place, ...] = get_args(Place)
_SPILLED_WORDS = {
    "optimizer": PLACES,
    "order": get_args(Order),
    "boundaries": PLACES,
    "transfer": get_args(Transfer),
    "master": get_args(Master),
}


def _set(technique: object, name: str, value: object) -> None:
    """What a frozen technique was given, as it is kept."""
    object.__setattr__(technique, name, value)


def _check_words(technique: object, known: Mapping[str, tuple[str, ...]]) -> None:
    for name, words in known.items():
        value = getattr(technique, name)
        if value is not None:
            _set(technique, name, one_of(name, value, words))
