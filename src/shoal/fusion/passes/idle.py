"""Slots that take no part in a micro-batch, and have gradients of others of the same step.

They see somebody's batch and weigh nothing. But 0 times what is not finite is NaN, in a loss or on
the way back from a finite one, as of the root of 0; and 0 added to -0 is no longer -0. So what a
backward makes for them is written over before it is added to anything.

[Note: -0 is nothing]
``x + -0.0`` is ``x`` in every bit, for 0.0 and -0.0 too; with 0.0 it is not so for -0.0. It takes
the place of what a backward made, where it lies: no row is copied, so that no plan has to know.
The rows of slots that wait are read by nobody, wherever else a backward hands that memory on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.fusion.crew import idle_slots

NOTHING = -0.0
"""What is added to a gradient and leaves it as it is."""


@contextmanager
def nothing_for_idle(
    blocks: Iterable[Tensor], active: Sequence[bool], *, adds: bool
) -> Iterator[None]:
    """Have a backward inside add nothing to the gradients of slots that take no part.

    ``blocks`` are stacked parameters [N, ...]; of those that have no gradient yet these slots'
    rows become ``NOTHING``. ``adds``: the step has other batches. Else nobody reads them, and
    nothing is done.
    """
    idle = _rows_idle(active) if adds else []
    trained = [block for block in blocks if block.requires_grad] if idle else []
    held = [block for block in trained if block.grad is not None]
    fresh = [block for block in trained if block.grad is None]
    hooks = [block.register_hook(lambda grad: _emptied(grad, idle)) for block in held]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for block in fresh:
        if block.grad is not None:
            _empty(block.grad, idle)


def add_gradients(
    blocks: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    active: Sequence[bool],
    *,
    adds: bool,
) -> None:
    """The same where a graph has made the gradients, which become or are added to those there are.

    Their memory is the parameters' from then on, or is given up.
    """
    idle = _rows_idle(active) if adds else []
    for name, gradient in gradients.items():
        _empty(gradient, idle)
        held = blocks[name].grad
        if held is None:
            blocks[name].grad = gradient
        else:
            held.add_(gradient)


def _rows_idle(active: Sequence[bool]) -> list[slice]:
    """Rows of slots that take no part."""
    found: list[slice] = []
    for slot in idle_slots(active):
        if found and found[-1].stop == slot:
            found[-1] = slice(found[-1].start, slot + 1)
        else:
            found.append(slice(slot, slot + 1))
    return found


def _emptied(grad: Tensor, rows: Sequence[slice]) -> Tensor | None:
    """A backward's gradient with ``NOTHING`` in ``rows``; None where that was written in place."""
    if grad.stride(0) == 0:  # one row that all slots share
        own = grad.clone(memory_format=torch.contiguous_format)
        _empty(own, rows)
        return own
    _empty(grad, rows)
    return None


def _empty(grad: Tensor, rows: Sequence[slice]) -> None:
    """Write ``NOTHING`` into ``rows``, whose elements may share memory within a slot's row."""
    if not rows:
        return
    for dim in range(1, grad.dim()):
        if grad.stride(dim) == 0:
            grad = grad.narrow(dim, 0, 1)
    with torch.no_grad():
        for some in rows:
            grad[some].fill_(NOTHING)
