"""Gradients that a forward takes itself: derivatives by what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.fusion.passes.slots import Slots
from shoal.fusion.rows.level import plainly


def grad(slots: Slots, outputs: Any, inputs: Any, grad_outputs: Any = None, **how: Any) -> Any:
    """``torch.autograd.grad`` for all slots at once: no output depends on another slot's input.

    Torch's own asks what the code holds for its graph, and finds none behind a batch's tensors.
    """
    wanted, by = _several(outputs), _several(inputs)
    if how.get("is_grads_batched") or not all(map(slots.level.is_slotted, (*wanted, *by))):
        return NotImplemented
    weights = _several(grad_outputs) if grad_outputs is not None else [None] * len(wanted)
    insides = [slots.level.open(tensor)[0] for tensor in wanted]
    dims = [slots.level.open(tensor)[1] or 0 for tensor in (*wanted, *by)]
    with plainly():
        given = [
            torch.ones_like(inside) if weight is None else slots.stacked(weight).movedim(0, dim)
            for inside, weight, dim in zip(insides, weights, dims, strict=False)
        ]
        found = torch.autograd.grad(
            insides, [slots.level.open(tensor)[0] for tensor in by], given, **how
        )
    own = zip(found, dims[len(wanted) :], strict=True)
    return tuple(None if one is None else slots.slotted(one, dim) for one, dim in own)


def _several(tensors: Any) -> Sequence[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
