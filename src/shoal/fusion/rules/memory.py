"""A tensor's memory by itself, and whether it has gradients: what torch's batching hides.

What code writes into the memory is to reach each slot's row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.fusion.passes.slots import Slots
from shoal.fusion.rows.level import plainly


def data(slots: Slots, tensor: Tensor) -> Any:
    """``tensor.data``: the same memory, without gradients and with versions of its own.

    Torch's batching refuses it, and slot by slot it would be a copy, in which writes get lost.
    """
    if not slots.level.is_innermost or not slots.level.is_slotted(tensor):
        return NotImplemented
    inside, dim = slots.level.open(tensor)
    with plainly():
        alias = inside.data
    return slots.slotted(alias, dim or 0)


def requires_grad(slots: Slots, tensor: Tensor) -> Any:
    """``tensor.requires_grad``, which torch's batching says of its wrapper: it never does."""
    if not slots.level.is_innermost or not slots.level.is_slotted(tensor):
        return NotImplemented
    with plainly():
        return slots.level.open(tensor)[0].requires_grad
