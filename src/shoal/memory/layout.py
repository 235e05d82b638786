"""Where every byte of a trial lies in its flat host store and in a device slot. Pure data.

[Note: flat shards]
One region per trial. Each shard is contiguous and has segments, every field aligned to
512 bytes (the granularity that device allocators give, so kernels see the same
alignment as in a plain run):

    host   | shard 0: param | state | grad | copy | shard 1: param | state | ... | buffers |
    slot   | param (owned) | borrowed ... | state | grad |

A copy of a segment is one flat copy. Shapes and strides travel with the field, so a
channels-last weight keeps its memory format. Of a shard whose weights travel as bfloat16 the
host has, beside the parameters, the copy that is loaded; a slot has nothing but that. Where its
master is split, the host has in the place of the parameters what the copy lacks of them:

    host   | shard 0: low | state | grad | copy | ...
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from shoal.core.spec import ALIGNMENT
from shoal.core.technique import (
    Pipelined,
    Spilled,
    Technique,
    has_split_master,
    heads_of,
    kept_shards,
    kept_weights,
    late_shards,
    travels_narrow,
    turned_shards,
    waiting_gradients,
)
from shoal.core.units import round_up

WORD = 8
"""Bytes in whole numbers of which a bit for each element is kept."""
PREVIOUS, GUESS = "previous", "guess"
"""The state tensor that is a parameter's version before, where a technique needs that."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides and type of one tensor; ``dtype`` is torch's name, such as "float32"."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    num_bytes: int  # of the storage the strides span
    key: str = ""  # the optimizer's name for a state tensor


@dataclass(frozen=True, slots=True)
class Field:
    """A tensor and its offset in a segment, in bytes."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Aligned fields, one after another; ``num_bytes`` includes the padding."""

    fields: tuple[Field, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One shard's segments and where they begin in the host region.

    ``copy`` are the parameters as they are loaded, where those are not ``param`` itself. ``low``
    is in the place of ``param`` where the weights that travel as bfloat16 are split: what that
    lacks of each, and nothing of the others, which are whole in ``copy``.
    """

    param: Segment
    state: Segment
    grad: Segment
    borrowed: tuple[tuple[int, Field], ...]  # (owner shard, field there) of tied parameters
    param_at: int
    state_at: int
    grad_at: int
    copy_at: int
    copy: Segment | None = None
    low: Segment | None = None

    @property
    def whole(self) -> Segment:
        """The parameters that the host has as they are: all that are not split."""
        if self.low is None or self.copy is None:
            return self.param
        split = {field.spec.name for field in self.low.fields}
        kept = (field for field in self.copy.fields if field.spec.name not in split)
        return Segment(tuple(kept), self.copy.num_bytes)

    @property
    def whole_at(self) -> int:
        """Where they are on the host, by their offsets."""
        return self.param_at if self.low is None else self.copy_at

    @property
    def loaded(self) -> Segment:
        """The owned parameters as a slot holds them."""
        return self.copy or self.param

    @property
    def loaded_at(self) -> int:
        """Where they are on the host."""
        return self.copy_at if self.copy else self.param_at

    @property
    def borrowed_bytes(self) -> int:
        return sum(round_up(field.spec.num_bytes, ALIGNMENT) for _, field in self.borrowed)


@dataclass(frozen=True, slots=True)
class TrialLayout:
    """The whole host region of one trial."""

    shards: tuple[ShardLayout, ...]
    buffers: Segment
    buffers_at: int
    num_bytes: int


def _only(names: Collection[str], of: Segment) -> Segment:
    return segment(field.spec for field in of.fields if field.spec.name in names)


def segment(specs: Iterable[TensorSpec]) -> Segment:
    """Fields one after another, each aligned."""
    fields, offset = [], 0
    for spec in specs:
        fields.append(Field(spec, offset))
        offset += round_up(spec.num_bytes, ALIGNMENT)
    return Segment(tuple(fields), offset)


def lay_out(
    owned: Sequence[Sequence[str]],
    borrowed: Sequence[Sequence[str]],
    parameters: Mapping[str, TensorSpec],
    states: Mapping[str, Sequence[TensorSpec]],
    buffers: Sequence[TensorSpec],
    grads: Mapping[str, TensorSpec] | None = None,
) -> TrialLayout:
    """The region for shards that own and borrow parameters by name.

    ``grads`` are as ``parameters`` if they are not given; not all parameters need have one.
    """
    shards: list[ShardLayout] = []
    home: dict[str, tuple[int, Field]] = {}
    offset = 0
    found = parameters if grads is None else grads
    for index, names in enumerate(owned):
        param = segment(parameters[name] for name in names)
        state = segment(spec for name in names for spec in states.get(name, ()))
        home |= {field.spec.name: (index, field) for field in param.fields}
        grad = segment(found[name] for name in names if name in found)
        shards.append(_placed_at(offset, param, state, grad))
        offset = shards[-1].copy_at
    tied = [tuple(home[name] for name in names) for names in borrowed]
    linked = tuple(replace(s, borrowed=ties) for s, ties in zip(shards, tied, strict=True))
    buffer_segment = segment(buffers)
    return TrialLayout(linked, buffer_segment, offset, offset + buffer_segment.num_bytes)


def state_of(layout: TrialLayout, technique: Technique, shard: int) -> Segment:
    """A shard's state as it lies for a technique: where several share what travels, sorted."""
    state = layout.shards[shard].state
    shares = shard in late_shards(technique) and len(heads_of(technique)) > 1
    return largest_first(state) if shares else state


def largest_first(state: Segment) -> Segment:
    """With small tensors at its end, so that a few more or less that travel are few bytes."""
    specs = (field.spec for field in state.fields)
    return segment(sorted(specs, key=lambda spec: -spec.num_bytes))


def as_it_travels(
    layout: TrialLayout, technique: Technique, names: Collection[str], *, sums: bool
) -> TrialLayout:
    """``layout`` for a technique: weights in ``names`` with a bfloat16 copy where they travel.

    Their gradients are bfloat16 too, unless they are ``sums`` over micro-batches. The state of
    shards lies as ``state_of`` has it.
    """
    parts: list[_Segments] = []
    for index, shard in enumerate(layout.shards):
        trained = {field.spec.name for field in shard.grad.fields}
        grad, copy, low = _only(trained, shard.param) if names else shard.grad, None, None
        if travels_narrow(technique, index) and names:
            copy = segment(_narrowed(f.spec, names) for f in shard.param.fields)
            grad = grad if sums else _only(trained, copy)
            low = _low(shard, copy) if has_split_master(technique) else None
        parts.append((shard.param, state_of(layout, technique, index), grad, copy, low))
    return _laid_out_anew(layout, parts)


def with_split_masters(layout: TrialLayout) -> TrialLayout:
    """``layout`` with the float32 of each weight that travels as bfloat16 split on the host."""
    parts: list[_Segments] = []
    for shard in layout.shards:
        low = _low(shard, shard.copy) if shard.copy else None
        parts.append((shard.param, shard.state, shard.grad, shard.copy, low))
    return _laid_out_anew(layout, parts)


def split_bytes(layout: ShardLayout, names: Collection[str] | None = None) -> int:
    """Of the float32 of a shard's split weights, or of those of these names, aligned."""
    split = {field.spec.name for field in layout.low.fields} if layout.low else set()
    return sum(
        round_up(field.spec.num_bytes, ALIGNMENT)
        for field in layout.param.fields
        if field.spec.name in split and (names is None or field.spec.name in names)
    )


def _low(shard: ShardLayout, copy: Segment) -> Segment:
    """What the host has of a shard's weights beside the bfloat16 that is loaded."""
    pairs = zip(shard.param.fields, copy.fields, strict=True)
    narrow = [whole.spec for whole, cast in pairs if whole.spec.dtype != cast.spec.dtype]
    sizes = {spec.name: sum(low_bytes(prod(spec.shape))) for spec in narrow}
    return segment(TensorSpec(n, (size,), (1,), "uint8", size) for n, size in sizes.items())


def low_bytes(count: int) -> tuple[int, int]:
    """Of what the bfloat16 of so many float32 lacks: 16 bits each, then one."""
    return round_up(2 * count, WORD), round_up(-(-count // 8), WORD)


def with_previous(
    layout: TrialLayout, trained: Collection[str] | None = None, *, guess: bool = False
) -> TrialLayout:
    """``layout`` with one state tensor more, "previous", for each parameter that is trained.

    And with a second one, "guess", if it is asked for.
    It has the parameter's shape and type, and comes after its optimizer's. None: all are.
    """
    parts: list[_Segments] = []
    for shard in layout.shards:
        states: dict[str, list[TensorSpec]] = {}
        for field in shard.state.fields:
            states.setdefault(field.spec.name, []).append(field.spec)
        for spec in (field.spec for field in shard.param.fields):
            if trained is None or spec.name in trained:
                keys = (PREVIOUS, GUESS) if guess else (PREVIOUS,)
                states.setdefault(spec.name, []).extend(replace(spec, key=key) for key in keys)
        names = [field.spec.name for field in shard.param.fields]
        state = segment(spec for name in names for spec in states.get(name, ()))
        parts.append((shard.param, state, shard.grad, shard.copy, None))
    return _laid_out_anew(layout, parts)


_Segments = tuple[Segment, Segment, Segment, Segment | None, Segment | None]
"""A shard's parameters, state, gradients, copy and low bits."""


def _laid_out_anew(layout: TrialLayout, parts: Iterable[_Segments]) -> TrialLayout:
    """``layout`` with other segments in its shards."""
    shards, offset = [], 0
    for shard, own in zip(layout.shards, parts, strict=True):
        made = _placed_at(offset, *own)
        shards.append(replace(made, borrowed=shard.borrowed))
        offset = made.copy_at + (made.copy.num_bytes if made.copy else 0)
    return TrialLayout(tuple(shards), layout.buffers, offset, offset + layout.buffers.num_bytes)


def _placed_at(
    offset: int,
    param: Segment,
    state: Segment,
    grad: Segment,
    copy: Segment | None = None,
    low: Segment | None = None,
) -> ShardLayout:
    state_at = offset + (param if low is None else low).num_bytes
    grad_at = state_at + state.num_bytes
    copy_at = grad_at + grad.num_bytes
    return ShardLayout(param, state, grad, (), offset, state_at, grad_at, copy_at, copy, low)


def _narrowed(spec: TensorSpec, names: Collection[str]) -> TensorSpec:
    if spec.name not in names:
        return spec
    return replace(spec, dtype="bfloat16", num_bytes=spec.num_bytes // 2)


def slot_parts(technique: Spilled, *, clip: bool, accumulate: int) -> tuple[str, ...]:
    """Which parts a device slot has room for besides the parameters.

    Of a step that clips what the optimizer needs comes into late slots; so does the state of
    ``late_shards`` of any.
    """
    with_state = technique.optimizer == "device" and not clip
    in_turns = accumulate > 1 and technique.order != "shard"
    return ("state",) * with_state + ("grad",) * in_turns


@dataclass(frozen=True, slots=True)
class Spot:
    """A place of its own for what stays of a shard on a device: bytes, and which parts."""

    start: int
    num_bytes: int
    parts: tuple[str, ...]  # "param", "state", "head"


@dataclass(frozen=True, slots=True)
class Arena:
    """A trial's region on a device: a spot for each shard that stays, then equal slots.

    Late slots are no part of it: their memory comes and goes with each step.

    Attributes:
        kept: Shard -> its spot; in order of shard.
        parts: What a slot has room for besides parameters.
        slots_at: The first byte of the first slot.
        late_bytes: Of one late slot, which has room for state, and for gradients after a norm.
        late: Shards whose state has room in late slots alone, not in ``parts``.
    """

    kept: Mapping[int, Spot]
    parts: tuple[str, ...]
    slots_at: int
    slot_bytes: int
    num_slots: int
    late_bytes: int = 0
    num_late: int = 0
    late: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.slots_at + self.num_slots * self.slot_bytes

    def parts_of(self, shard: int) -> tuple[str, ...]:
        """What of a shard a slot has room for besides parameters."""
        return tuple(part for part in self.parts if part != "state" or shard not in self.late)

    def place(self, slot: int) -> tuple[int, int]:
        """First byte and size of a slot as programs number them: what is kept comes first."""
        if slot < len(self.kept):
            spot = list(self.kept.values())[slot]
            return spot.start, spot.num_bytes
        return self.slots_at + (slot - len(self.kept)) * self.slot_bytes, self.slot_bytes


def arena(layout: TrialLayout, technique: Technique, *, clip: bool, accumulate: int) -> Arena:
    """What a technique needs of the device for the shards of ``layout``."""
    kept: dict[int, Spot] = {}
    offset = 0
    whole, heads = kept_shards(technique), heads_of(technique)
    for shard, stays in _staying(technique).items():
        size = _size(layout.shards[shard], stays) + heads.get(shard, 0)
        kept[shard] = Spot(offset, size, stays)
        offset += size
    if not isinstance(technique, Spilled):
        return Arena(kept, (), offset, 0, 0)
    parts = slot_parts(technique, clip=clip, accumulate=accumulate)
    late = () if clip else late_shards(technique)
    moving = [number for number in range(len(layout.shards)) if number not in whole]
    if "grad" in parts:
        slotted = moving
    elif set(moving) <= set(turned_shards(technique, len(layout.shards))):
        slotted = []  # memory of their own
    else:
        slotted = [number for number in moving if number not in late]
    sizes = [_in_a_slot(layout, technique, number, parts) for number in slotted]
    most = 1 + (technique.lookahead or 0)
    count = min(most, len(sizes))
    after = _late_sizes(layout, technique, clip=clip)
    room = max(after, default=0), min(most, len(after))
    return Arena(kept, parts, offset, max(sizes, default=0), count, *room, late)


def stage_arena(
    layout: TrialLayout, technique: Pipelined, here: Sequence[int], *, clip: bool
) -> Arena:
    """What a stage needs of its device for its shards, where they come and go."""
    kept, offset = {}, 0
    for shard in (shard for shard in here if shard in kept_shards(technique)):
        kept[shard] = Spot(
            offset, _size(layout.shards[shard], ("param", "state")), ("param", "state")
        )
        offset += kept[shard].num_bytes
    moving = [layout.shards[shard] for shard in here if shard not in kept]
    state = technique.optimizer == "device"
    visits = technique.schedule != "gpipe" and (technique.micro_batches or 1) > 1
    sums = visits and not technique.keep_gradients  # gradients come back to be added to
    parts = ("state",) * (state and not clip) + ("grad",) * sums
    slot = max((_size(shard, ("param", *parts)) for shard in moving), default=0)
    count = min(1 + (technique.lookahead or 0), len(moving))
    if not (clip and state):
        return Arena(kept, parts, offset, slot, count)
    late = ("state",) if technique.keep_gradients else ("state", "grad")
    most = max((_size(shard, late) for shard in moving), default=0)
    return Arena(kept, parts, offset, slot, count, most, count)


def _in_a_slot(
    layout: TrialLayout, technique: Spilled, number: int, parts: tuple[str, ...]
) -> int:
    """What a shard that is not kept has in a slot; its state may be for late slots alone."""
    head = heads_of(technique).get(number, 0)
    if number not in kept_weights(technique):
        return _size(layout.shards[number], ("param", *parts)) - head
    if number in late_shards(technique):
        parts = tuple(part for part in parts if part != "state")
    return _size(layout.shards[number], parts) - head * ("state" in parts)


def _late_sizes(layout: TrialLayout, technique: Spilled, *, clip: bool) -> list[int]:
    """What each shard has in a late slot: gradients after a norm alone."""
    heads, weights = heads_of(technique), kept_weights(technique)
    if not clip:
        return [layout.shards[s].state.num_bytes - heads.get(s, 0) for s in late_shards(technique)]
    if technique.optimizer != "device":
        return []
    waiting = waiting_gradients(technique, len(layout.shards))
    return [
        _size(shard, ("state",) if number in waiting else ("state", "grad"))
        - heads.get(number, 0) * (number in weights)
        for number, shard in enumerate(layout.shards)
        if number not in kept_shards(technique)
    ]


def _staying(technique: Technique) -> Mapping[int, tuple[str, ...]]:
    """Shard -> what of it stays on the device, in order of shard; its gradients are autograd's."""
    stays: dict[int, tuple[str, ...]] = {s: ("param", "state") for s in kept_shards(technique)}
    stays |= {shard: ("param",) for shard in kept_weights(technique)}
    for shard in heads_of(technique):
        stays[shard] = (*stays.get(shard, ()), "head")
    return dict(sorted(stays.items()))


def head_sizes(segment: Segment) -> tuple[int, ...]:
    """Bytes of the first tensors of a segment: of one, of two, and so on, but not of all."""
    return tuple(field.offset for field in segment.fields[1:])


def _size(shard: ShardLayout, parts: tuple[str, ...]) -> int:
    return (
        ("param" in parts) * (shard.loaded.num_bytes + shard.borrowed_bytes)
        + ("state" in parts) * shard.state.num_bytes
        + ("grad" in parts) * shard.grad.num_bytes
    )


def lenders(layout: TrialLayout) -> tuple[int, ...]:
    """Shards whose parameters another shard borrows."""
    return tuple(sorted({owner for shard in layout.shards for owner, _ in shard.borrowed}))
