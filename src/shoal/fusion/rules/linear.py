"""Linear layers: one batched product of matrices with the bias inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.fusion.passes.slots import Slots
from shoal.fusion.rows.level import plainly


def linear(slots: Slots, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """``baddbmm`` over x_NRI, weight_NOI, bias_NO, where R is all rows of a slot."""
    if input.dim() < 2 or not slots.has_values(weight):
        return NotImplemented
    with_bias = bias is not None
    x, w = slots.stacked(input), slots.stacked(weight)
    b = slots.stacked(bias) if bias is not None else None
    with plainly():
        out = products(x.flatten(1, -2), w, b if with_bias else None)
        out = torch.ops.aten._unsafe_view(out, (*x.shape[:-1], w.shape[1]))
    return slots.slotted(out)


def products(x_NRI: Tensor, w_NOI: Tensor, b_NO: Tensor | None) -> Tensor:
    """Rows times weights for every slot: [N, R, O]."""
    out: Tensor = _Products.apply(*in_autocast(x_NRI, w_NOI, b_NO))  # type: ignore[no-untyped-call]
    return out


def in_autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast would make of the arguments, for operations that it does not know."""
    return cast(x), cast(weight), None if bias is None else cast(bias)


def cast(tensor: Tensor) -> Tensor:
    """As autocast has it for a product; float64 is left as it is, and what is no float."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind):
        return tensor
    is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(kind)) if is_cast else tensor


class _Products(torch.autograd.Function):
    """``baddbmm`` whose gradient for the weights comes out as they lie in memory.

    Torch's own comes out transposed and is then copied, which for a wide layer costs more than
    the product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        if b is None:
            return torch.bmm(x, w.transpose(1, 2))
        return torch.baddbmm(b.unsqueeze(1), x, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        for_x, for_w, for_b = ctx.needs_input_grad
        return (
            torch.bmm(gradient, w) if for_x else None,
            torch.bmm(gradient.transpose(1, 2), x) if for_w else None,
            gradient.sum(1) if for_b else None,
        )
