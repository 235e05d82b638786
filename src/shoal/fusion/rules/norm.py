"""BatchNorm: slots beside channels, each with its own statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.fusion.level import plainly
from shoal.fusion.perslot import PerSlot
from shoal.fusion.slots import Slots


def batch_norm(
    slots: Slots,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """One ``batch_norm`` over N times C channels; statistics are written where they are.

    Torch's own batching normalises without weights and multiplies afterwards, a pass more.
    """
    held = [t for t in (weight, bias, running_mean, running_var) if t is not None]
    if isinstance(eps, PerSlot) or not slots.has_values(input, *held):
        return NotImplemented
    if not all(slots.has_values(t) for t in (running_mean, running_var) if t is not None):
        return NotImplemented
    x = slots.stacked(input)
    w, b, mean, var = (
        None if t is None else slots.stacked(t).reshape(-1)
        for t in (weight, bias, running_mean, running_var)
    )
    with plainly():
        x_BMP = x.transpose(0, 1).flatten(1, 2)  # a view where slots lie beside channels
        if isinstance(momentum, PerSlot) and training and mean is not None and var is not None:
            rates = slots.numbers(momentum, mean).repeat_interleave(x.shape[2])
            found_mean, found_var = torch.zeros_like(mean), torch.zeros_like(var)
            out = torch.batch_norm(
                x_BMP, w, b, found_mean, found_var, True, 1.0, eps, cudnn_enabled
            )
            mean.mul_(1 - rates).add_(found_mean * rates)
            var.mul_(1 - rates).add_(found_var * rates)
        else:
            rate = momentum.values[0] if isinstance(momentum, PerSlot) else momentum
            out = torch.batch_norm(x_BMP, w, b, mean, var, training, rate, eps, cudnn_enabled)
        shape = (out.shape[0], slots.width, x.shape[2], *out.shape[2:])
        out = torch.ops.aten._unsafe_view(out, shape)  # no view: a ReLU may write into it
    return slots.slotted(out, 1)
