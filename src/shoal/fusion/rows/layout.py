"""How images of all slots lie in memory, and how one slot's would lie in its trial alone.

[Note: how images lie in memory]
With a group per slot a CPU's kernels take half as long for few channels if these lie next to each
other, [B, H, W, N, C] in memory, and longer for many (docs/lab.md). What follows a convolution,
BatchNorm or an activation, leaves them as they lie. So each lays them as its channels want, which
is a copy where that changes; in every dtype alike, since a dry run in float64 has to meet what
training meets.

A trial alone has them as [B, C, H, W], and a few operations tell: ``view`` merges what lies side
by side, and what draws fills memory in its order. They get a copy that lies as alone. What code
writes into that copy is not in the original: a dry run finds who counts on it, or on ``stride``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def as_alone(x_N: Tensor) -> Tensor:
    """The same values, each slot's as they lie alone; a copy where slots are beside channels.

    ``x_N``: slots first [N, ...]. See [Note: how images lie in memory].
    """
    order = _order(x_N)
    if order is None:
        return x_N
    return x_N.permute(0, *order).contiguous().permute(0, *(order.index(d) + 1 for d in DIMS))


def in_one_piece(x_N: Tensor) -> Tensor:
    """As ``as_alone``; a copy also where a slot's is in pieces, between others', and alone is not.

    Of what is in one piece ``normal_`` draws other numbers on a CPU.
    """
    laid = as_alone(x_N)
    is_beside = any(laid.movedim(0, at).is_contiguous() for at in range(1, laid.dim()))
    return laid.contiguous() if is_beside else laid


def one_alone(x_N: Tensor) -> Tensor:
    """A tensor of one slot's shape, with strides in the order that it has alone."""
    order = _order(x_N)
    if order is None:
        return x_N[0]
    made = x_N.new_empty([x_N.shape[dim] for dim in order])
    return made.permute([order.index(dim) for dim in DIMS])


DIMS = range(1, 5)
"""Of a slot's images: rows first, and the others as the code may have permuted them."""


def _order(x_N: Tensor) -> list[int] | None:
    """A slot's dimensions from outside in: rows, channels, pixels; None if it lies so, or none do.

    In [B, H, W, N, C] one dimension is within slots, and pixels are not; as in nothing else.
    """
    if x_N.dim() != 5:
        return None
    sizes, strides = x_N.shape, x_N.stride()
    within = [dim for dim in DIMS if sizes[dim] > 1 and strides[dim] < strides[0]]
    if len(within) != 1 or within[0] == 1:
        return None
    pixels = sorted({2, 3, 4} - {within[0]}, key=lambda dim: -strides[dim])
    return [1, *within, *pixels] if any(sizes[dim] > 1 for dim in pixels) else None


FORMATS = (torch.contiguous_format, torch.channels_last)


def laid(x: Tensor, wanted: torch.memory_format) -> Tensor:
    """x_BDHW laid as ``wanted``, a copy where it is not; its gradient comes as ``x`` lies.

    An activation's backward takes six times as long where its gradient lies otherwise than it.
    """
    if x.is_contiguous(memory_format=wanted):
        return x
    before = next((f for f in FORMATS if x.is_contiguous(memory_format=f)), None)
    if before is None or not x.requires_grad:
        return x.contiguous(memory_format=wanted)
    return _Laid.apply(x, wanted, before)  # type: ignore[no-any-return, no-untyped-call]


class _Laid(torch.autograd.Function):
    """A copy that lies otherwise; the gradient is laid back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, wanted: torch.memory_format, before: torch.memory_format
    ) -> Tensor:
        ctx.before = before
        return x.contiguous(memory_format=wanted)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].contiguous(memory_format=ctx.before), None, None
