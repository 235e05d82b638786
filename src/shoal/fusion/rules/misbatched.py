"""Operations of which torch's batching makes something else than each is alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.fusion.passes.slots import Slots
from shoal.fusion.rows.level import plainly


def roll(slots: Slots, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of one number, which rolling leaves; torch's batching would roll it from slot to slot."""
    return input.clone() if input.dim() == 0 else NotImplemented


def select_scatter(slots: Slots, input: Tensor, src: Tensor, dim: int, index: int) -> Any:
    """The lone kernel: through torch's batching the gradient by ``src`` is another one."""
    if not slots.level.is_innermost or not slots.has_values(input, src):
        return NotImplemented
    x, s = slots.stacked(input), slots.stacked(src)
    with plainly():
        return slots.slotted(torch.select_scatter(x, s, dim % input.dim() + 1, index))
