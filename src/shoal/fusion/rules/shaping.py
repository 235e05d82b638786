"""What merges dimensions that lie side by side, or fails: of images it is given what lies so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shoal.fusion.passes.slots import Rule, Slots
from shoal.fusion.rows.layout import as_alone
from shoal.fusion.rows.level import plainly


def as_it_lies_alone(operation: Callable[..., Tensor]) -> Rule:
    """A rule for an operation that depends on strides. See ``layout.py``."""

    def rule(slots: Slots, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.dim() != 4 or not slots.has_values(input) or not slots.level.is_innermost:
            return NotImplemented
        x = slots.stacked(input)
        with plainly():
            laid = as_alone(x)
        if laid is x:
            return NotImplemented
        return operation(slots.slotted(laid), *args, **kwargs)

    return rule
