"""Pooling."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.fusion.passes.slots import Slots
from shoal.fusion.rows.level import plainly


def adaptive_avg_pool2d(slots: Slots, input: Tensor, output_size: Any) -> Any:
    """To one pixel it is a mean, as in torch, which then lays it anew: that has no batching."""
    sizes = (output_size,) * 2 if isinstance(output_size, int) else tuple(output_size)
    if sizes != (1, 1) or not slots.has_values(input) or not slots.level.is_innermost:
        return NotImplemented
    x = slots.stacked(input)
    with plainly():
        return slots.slotted(x.mean((-2, -1), keepdim=True))
