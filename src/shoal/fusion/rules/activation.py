"""Activations that write into what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shoal.fusion.passes.slots import Rule, Slots
from shoal.fusion.rows.level import plainly
from shoal.fusion.rows.perslot import PerSlot


def where_it_lies(operation: Callable[..., Tensor]) -> Rule:
    """A rule for an operation that writes over each value of its first tensor by itself.

    Torch's batching writes into a view with slots first. Backwards, autograd lays the gradient
    of what was written into a view anew: two passes more, slow ones where images lie otherwise.
    """

    def rule(slots: Slots, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        numbers = (*args, *kwargs.values())
        is_ours = slots.level.is_innermost and slots.level.is_slotted(input)
        if not is_ours or any(isinstance(x, PerSlot | Tensor) for x in numbers):
            return NotImplemented
        inside, _ = slots.level.open(input)
        with plainly():
            operation(inside, *args, **kwargs)
        return input

    return rule
