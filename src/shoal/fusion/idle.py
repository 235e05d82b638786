"""Slots that take no part in a micro-batch, and have gradients of others of the same step.

They see somebody's batch and weigh nothing. But 0 times what is not finite is NaN: where they
make such a loss of that batch, the gradients that they have are put aside meanwhile. Not where
the loss is finite and its gradient is not, as of the root of 0: copies for every batch that
somebody lacks would be memory that no plan has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

Rows = Mapping[tuple[str, int], Tensor | None]
"""Gradients by parameter and slot; None where there is none yet."""


def idle_slots(active: Sequence[bool]) -> list[int]:
    """Those that take no part."""
    return [slot for slot, is_active in enumerate(active) if not is_active]


def in_danger(losses: Tensor, active: Sequence[bool], scale: float) -> bool:
    """Whether gradients of slots that take no part would become NaN; ``losses`` [N]."""
    idle = idle_slots(active)
    if scale == 1 or not idle:  # of a step of one batch none is used
        return False
    return not bool(losses.detach()[idle].isfinite().all())


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
