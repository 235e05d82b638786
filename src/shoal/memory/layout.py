"""Where every byte of a trial lies in its flat host store and in a device slot. Pure data.

[Note: flat shards]
One region per trial. Each shard is contiguous and has segments, every field aligned to
512 bytes (the granularity that device allocators give, so kernels see the same
alignment as in a plain run):

    host   | shard 0: param | state | grad | shard 1: param | state | grad | ... | buffers |
    slot   | param (owned) | borrowed ... | state | grad |

A copy of a segment is one flat copy. Shapes and strides travel with the field, so a
channels-last weight keeps its memory format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.core.plan import Resident, Spilled, Technique, kept_shards, kept_weights
from shoal.core.spec import ALIGNMENT
from shoal.core.units import round_up


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
    """One shard's segments and where they begin in the host region."""

    param: Segment
    state: Segment
    borrowed: tuple[tuple[int, Field], ...]  # (owner shard, field there) of tied parameters
    param_at: int
    state_at: int
    grad_at: int

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
) -> TrialLayout:
    """The region for shards that own and borrow parameters by name."""
    shards: list[ShardLayout] = []
    home: dict[str, tuple[int, Field]] = {}
    offset = 0
    for index, names in enumerate(owned):
        param = segment(parameters[name] for name in names)
        state = segment(spec for name in names for spec in states.get(name, ()))
        home |= {field.spec.name: (index, field) for field in param.fields}
        state_at = offset + param.num_bytes
        grad_at = state_at + state.num_bytes
        shards.append(ShardLayout(param, state, (), offset, state_at, grad_at))
        offset = grad_at + param.num_bytes
    tied = [tuple(home[name] for name in names) for names in borrowed]
    linked = tuple(
        ShardLayout(s.param, s.state, ties, s.param_at, s.state_at, s.grad_at)
        for s, ties in zip(shards, tied, strict=True)
    )
    buffer_segment = segment(buffers)
    return TrialLayout(linked, buffer_segment, offset, offset + buffer_segment.num_bytes)


def slot_parts(technique: Spilled, *, clip: bool, accumulate: int) -> tuple[str, ...]:
    """Which parts a device slot has room for besides the parameters."""
    on_device = technique.optimizer == "device"
    in_turns = accumulate > 1 and technique.order != "shard"
    grads_return = in_turns or (on_device and clip)
    return ("state",) * on_device + ("grad",) * grads_return


@dataclass(frozen=True, slots=True)
class Spot:
    """A place of its own for what stays of a shard on a device: bytes, and which parts."""

    start: int
    num_bytes: int
    parts: tuple[str, ...]  # besides the parameters


@dataclass(frozen=True, slots=True)
class Arena:
    """A trial's region on a device: a spot for each shard that stays, then equal slots.

    Attributes:
        kept: Shard -> its spot; in order of shard.
        parts: What a slot has room for besides parameters.
        slots_at: The first byte of the first slot.
    """

    kept: Mapping[int, Spot]
    parts: tuple[str, ...]
    slots_at: int
    slot_bytes: int
    num_slots: int

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.slots_at + self.num_slots * self.slot_bytes

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
    whole, weights = kept_shards(technique), kept_weights(technique)
    for shard in sorted((*whole, *weights)):
        stays = ("state",) if shard in whole else ()  # its gradients are autograd's
        size = _size(layout.shards[shard], ("param", *stays))
        kept[shard] = Spot(offset, size, stays)
        offset += size
    if isinstance(technique, Resident):
        return Arena(kept, (), offset, 0, 0)
    parts = slot_parts(technique, clip=clip, accumulate=accumulate)
    sizes = [
        _size(shard, parts if number in weights else ("param", *parts))
        for number, shard in enumerate(layout.shards)
        if number not in whole
    ]
    count = min(1 + (technique.lookahead or 0), len(sizes))
    return Arena(kept, parts, offset, max(sizes, default=0), count)


def _size(shard: ShardLayout, parts: tuple[str, ...]) -> int:
    return (
        ("param" in parts) * (shard.param.num_bytes + shard.borrowed_bytes)
        + ("state" in parts) * shard.state.num_bytes
        + ("grad" in parts) * shard.param.num_bytes
    )


def lenders(layout: TrialLayout) -> tuple[int, ...]:
    """Shards whose parameters another shard borrows."""
    return tuple(sorted({owner for shard in layout.shards for owner, _ in shard.borrowed}))
