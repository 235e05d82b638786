"""Slots that take no part in a micro-batch, and have gradients of others of the same step.

They see somebody's batch and weigh nothing. But 0 times what is not finite is NaN, in a loss or on
the way back from a finite one: so the gradients that they have are put aside meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

Rows = Mapping[tuple[str, int], Tensor | None]
"""Gradients by parameter and slot; None where there is none yet."""


def idle_slots(active: Sequence[bool]) -> list[int]:
    """Those that take no part."""
    return [slot for slot, is_active in enumerate(active) if not is_active]


def in_danger(active: Sequence[bool], scale: float) -> bool:
    """Whether gradients of slots that take no part may become NaN."""
    return scale != 1 and not all(active)  # of a step of one batch none is used


def put_aside(blocks: Mapping[str, Tensor], slots: Iterable[int]) -> Rows:
    """Copies of the gradients that ``slots`` have so far; of stacked parameters by name."""
    grads = {name: block.grad for name, block in blocks.items()}
    return {
        (name, slot): None if grad is None else grad[slot].clone()
        for slot in slots
        for name, grad in grads.items()
    }


def put_back(blocks: Mapping[str, Tensor], rows: Rows) -> None:
    """As they were; zero where there was none."""
    for (name, slot), row in rows.items():
        grad = blocks[name].grad
        if grad is not None and row is None:
            grad[slot].zero_()
        elif grad is not None and row is not None:
            grad[slot].copy_(row)
