"""Float32 weights as the bfloat16 that is loaded of them, and the bits that are lost there.

[Note: a split weight]
Of a float32 x, as an int32, and the bfloat16 h that is nearest to it, as an int16, the difference

    d = x - (h << 16)        -0x8000 <= d <= +0x8000

is an int16, but for the one value at its upper end: x lay in the middle, and the even neighbour
was below. That is the case for one weight of 131,000. So there are 16 bits for d, as they wrap,
which are the low ones of x, and one more, which is set where x is 0x10000 more than they say:

    float32   4 bytes         bfloat16   2 bytes, which are loaded
                              low        2 bytes
                              ties       1 bit

A NaN has to come back with the bits that it had, and its bfloat16 has to be one too. Nearest may
be none: an infinity, or a zero of the other sign. Then h is the nearest NaN there is, and d, of up
to 17 bits, wraps. It is told by the same bit: above the largest h, and below the least, of which
no number and no other NaN sets it.

Weights are taken in pieces that a cache holds, so what moves in memory is the weight and its parts
alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.memory.layout import WORD, ShardLayout, TensorSpec, low_bytes
from shoal.memory.store import views

_PIECE = 1 << 17  # elements of a thread's; whole rows
_ROW = 512  # elements that are looked at together
_MANY = 1 << 18  # elements that are no longer few
_INFINITY = 0x7F800000
_LEAST_NAN, _LARGEST_NAN = 0x7F81, 0x7FFF  # of a bfloat16


def split_into(values: Tensor, high: Tensor, low: Tensor, ties: Tensor) -> None:
    """Write float32 ``values`` as bfloat16 ``high``, int16 ``low``, and a bit each in ``ties``.

    ``high`` is the cast of ``values``. They lie in memory alike, without gaps. ``ties`` is flat,
    uint8, in whole ``WORD``s: that of element ``i`` is bit ``i % 8`` of byte ``i // 8``.
    """
    source, nearest, rest = _flat(values), _flat(high), _flat(low)
    bits, size = source.view(torch.int32), _piece()
    ties.zero_()
    found, count = [], 0
    for start in range(0, source.numel(), size):
        piece = slice(start, min(start + size, source.numel()))
        nearest[piece].copy_(source[piece])
        odd = _odd(source[piece], rest[piece].copy_(bits[piece]))  # which wraps
        if odd.numel():
            found.append(odd.add_(start))
            count += odd.numel()
        if count > _MANY or (found and piece.stop == source.numel()):
            _split_odd(torch.cat(found), bits, nearest, ties)
            found, count = [], 0


def joined(high: Tensor, low: Tensor, ties: Tensor, out: Tensor) -> None:
    """Write the float32 that ``split_into`` was given to ``out``, to the bit."""
    bits, nearest, rest = _flat(out).view(torch.int32), _flat(high).view(torch.int16), _flat(low)
    size = min(_piece(), bits.numel())
    upper, lower = (torch.empty(size, dtype=torch.int32) for _ in range(2))
    for start in range(0, bits.numel(), size or 1):
        piece = slice(start, min(start + size, bits.numel()))
        here = slice(piece.stop - start)
        above, below = upper[here].copy_(nearest[piece]), lower[here].copy_(rest[piece])
        torch.add(below, above, alpha=1 << 16, out=bits[piece])
    for odd in _marked(ties):
        is_least = (nearest[odd] & 0x7FFF) == _LEAST_NAN
        bits[odd] += torch.where(is_least, -0x10000, 0x10000).to(torch.int32)


def _odd(values: Tensor, low: Tensor) -> Tensor:
    """The numbers of those whose cast may need more than 16 bits beside it; few rows have one."""
    if _flushes() or values.amax().isnan():
        rare = values.isnan().logical_or_(low.eq(-0x8000))
        if _flushes():
            rare.logical_or_(values.abs().lt(2.0**-126))
        return rare.nonzero().squeeze(1)
    if low.numel() % _ROW:
        return low.eq(-0x8000).nonzero().squeeze(1)
    rows = low.view(-1, _ROW)
    has_one = rows.amin(1).eq(-0x8000).nonzero().squeeze(1)
    row, column = rows[has_one].eq(-0x8000).nonzero().unbind(1)
    return has_one[row] * _ROW + column


@functools.cache
def _flushes() -> bool:
    """Whether this machine's cast takes the smallest numbers for 0, which is not the nearest."""
    return not bool(torch.full((1024,), 2.0**-130).bfloat16().all())


def _split_odd(odd: Tensor, bits: Tensor, high: Tensor, ties: Tensor) -> None:
    """The elements that 16 bits may not tell: those in the middle, and NaNs."""
    is_negative, size = bits[odd] < 0, bits[odd].to(torch.int64) & 0x7FFFFFFF
    nearest = (size + 0x7FFF + ((size >> 16) & 1)) >> 16
    of_nan = nearest.clamp(_LEAST_NAN, _LARGEST_NAN)
    nearest = torch.where(size > _INFINITY, of_nan, nearest)
    difference = size - (nearest << 16)
    high.view(torch.int16)[odd] = (nearest + 0x8000 * is_negative).to(torch.int16)
    tied = odd[(difference < -0x8000) | (difference > 0x7FFF)]
    bit = torch.bitwise_left_shift(torch.ones_like(tied), tied % 8).to(torch.uint8)
    ties.index_add_(0, tied // 8, bit)  # each bit once


def _marked(ties: Tensor) -> Iterator[Tensor]:
    """The numbers of the bits that are set, some at a time."""
    words = ties.view(torch.int64).nonzero().squeeze(1)
    for some in words.split(_MANY // (8 * WORD)):
        bits = (ties.view(-1, WORD)[some, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        word, rest = bits.view(-1, 8 * WORD).nonzero().unbind(1)
        yield some[word] * 8 * WORD + rest


def _piece() -> int:
    return _PIECE * torch.get_num_threads()


def _flat(tensor: Tensor) -> Tensor:
    """All of a dense tensor's memory in its own order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


@dataclass(frozen=True, slots=True)
class SplitWeight:
    """A weight on the host without its float32. The memory is its region's.

    ``spec`` is that of the float32.
    """

    spec: TensorSpec
    high: Tensor
    low: Tensor
    ties: Tensor

    def join(self, out: Tensor) -> None:
        """Write the float32 to ``out``, which lies in memory as the weight does."""
        joined(self.high, self.low, self.ties, out)

    def split(self, values: Tensor) -> None:
        """Take ``values`` up, which lie in memory as the weight does."""
        split_into(values, self.high, self.low, self.ties)

    def empty(self) -> Tensor:
        """Memory for the float32, of its own."""
        return torch.empty_strided(self.spec.shape, self.spec.stride, dtype=torch.float32)

    def whole(self) -> Tensor:
        """The float32 in memory of its own."""
        self.join(out := self.empty())
        return out


def split_weights(flat: Tensor, shard: ShardLayout) -> dict[str, SplitWeight]:
    """A shard's weights that are split, by name, in the region ``flat``."""
    if shard.low is None:
        return {}
    assert shard.copy is not None
    high, found = views(flat, shard.copy, shard.copy_at), {}
    specs = {field.spec.name: field.spec for field in shard.param.fields}
    for name, both in views(flat, shard.low, shard.param_at).items():
        count = high[name].numel()
        low, ties = both.split(low_bytes(count))
        found[name] = SplitWeight(specs[name], high[name], low.view(torch.int16)[:count], ties)
    return found


def write_params(flat: Tensor, shard: ShardLayout, values: Mapping[str, Tensor]) -> None:
    """Write a shard's parameters to the region ``flat``, whatever their strides."""
    for name, place in views(flat, shard.whole, shard.whole_at).items():
        place.copy_(values[name].detach())
    for name, weight in split_weights(flat, shard).items():
        (dense := weight.empty()).copy_(values[name].detach())
        weight.split(dense)
