"""BatchNorm, with slots beside channels, each with its own statistics; and weights of a norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.fusion.passes.slots import Slots
from shoal.fusion.rows.level import plainly


def weight_norm(slots: Slots, v: Tensor, g: Tensor, dim: int = 0) -> Any:
    """Of operations that torch batches, as its own kernel is not; ``dim`` -1: one norm of all."""
    if not slots.has_values(v, g):
        return NotImplemented
    every = [one for one in range(v.dim()) if one != dim]
    return v * (g / torch.linalg.vector_norm(v, 2, every, keepdim=dim != -1))


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
    if not slots.has_values(input, *held):
        return NotImplemented
    if not all(slots.has_values(t) for t in (running_mean, running_var) if t is not None):
        return NotImplemented
    x = slots.stacked(input)
    w, b, mean, var = (
        None if t is None else slots.stacked(t).reshape(-1)
        for t in (weight, bias, running_mean, running_var)
    )
    writes = training and running_mean is not None
    with plainly():
        x_BMP = x.transpose(0, 1).flatten(1, 2)  # a view where slots lie beside channels
        out = None
        # By the kernel that all would take if they had one value, whatever the others have.
        for (rate, small), mine in slots.by_value(momentum if writes else 0.0, eps).items():
            if len(mine) == slots.width:
                out = torch.batch_norm(
                    *(x_BMP, w, b, mean, var), training, rate, small, cudnn_enabled
                )
                break
            chosen = torch.zeros(slots.width, dtype=torch.bool, device=x.device)
            chosen[mine] = True
            chosen = chosen.repeat_interleave(x.shape[2])
            new_mean, new_var = (None if t is None else t.clone() for t in (mean, var))
            numbers = (rate, small, cudnn_enabled)
            some = torch.batch_norm(x_BMP, w, b, new_mean, new_var, training, *numbers)
            for t, new in ((mean, new_mean), (var, new_var)):
                if writes and t is not None and new is not None:
                    t[chosen] = new[chosen]
            here = chosen.view(1, -1, *([1] * (some.dim() - 2)))
            out = some if out is None else torch.where(here, some, out)
        assert out is not None
        shape = (out.shape[0], slots.width, x.shape[2], *out.shape[2:])
        out = torch.ops.aten._unsafe_view(out, shape)  # no view: a ReLU may write into it
    return slots.slotted(out, 1)
