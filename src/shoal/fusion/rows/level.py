"""Tensors that stand for one tensor per slot, and the way to the stacked ones inside.

Inside ``entered`` a *slotted* tensor looks to the model's code like one trial's, and torch
applies each operation to all slots. This is what ``torch.func.vmap`` does; the private calls
of torch that it is made of are gathered in this file, since a rule has to reach the stacked
tensor within at the price of a microsecond, for which there is no public call.
Wrappers die with the level: what leaves must be opened before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as _stubbed
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

_functorch: Any = _stubbed  # its annotations lag behind it


def plainly() -> AbstractContextManager[Any]:
    """A context in which operations on stacked tensors are torch's ordinary ones."""
    if _functorch.maybe_current_level() is None:  # within another such context
        return nullcontext()
    return temporarily_pop_interpreter_stack()


class Level:
    """One nesting of the array's dimension: ``width`` slots."""

    def __init__(self, width: int, number: int) -> None:
        self.width, self._number = width, number

    def slotted(self, stacked: Tensor, dim: int = 0) -> Tensor:
        """The tensor as the model's code sees it; dimension ``dim`` counts slots."""
        found: Tensor = _functorch._add_batch_dim(stacked, dim, self._number)
        return found

    @property
    def is_innermost(self) -> bool:
        """Whether none of torch's transforms is open within it, as a model's own ``vmap`` is."""
        return bool(_functorch.maybe_current_level() == self._number)

    def is_slotted(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` has a value per slot."""
        return bool(_functorch.is_batchedtensor(tensor))

    def open(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """The tensor within and its dimension of slots, or a shared tensor and None."""
        if not _functorch.is_batchedtensor(tensor):
            return tensor, None
        found: tuple[Tensor, int | None] = _functorch._unwrap_batched(tensor, self._number)
        return found

    def stacked(self, tensor: Tensor) -> Tensor:
        """The tensor within, slots first [N, ...]; a shared one repeated without a copy."""
        inside, dim = self.open(tensor)
        if dim is None:
            return inside.unsqueeze(0).expand(self.width, *inside.shape)
        return inside if dim == 0 else inside.movedim(dim, 0)


@contextmanager
def entered(width: int) -> Iterator[Level]:
    """A level of ``width`` slots, for one pass of the model's code.

    An operation that torch has no batching for raises, so that ``SlotMode`` can take over
    (torch would run its parts slot by slot, and warn). So does one that draws random numbers,
    which torch would draw from the process's generator, for all slots in one.
    """
    allowed = _functorch._is_vmap_fallback_enabled()
    _functorch._set_vmap_fallback_enabled(False)
    number = _functorch._vmap_increment_nesting(width, "error")
    try:
        yield Level(width, number)
    finally:
        _functorch._vmap_decrement_nesting()
        _functorch._set_vmap_fallback_enabled(allowed)


def like_alone(width: int, one: Tensor, device: torch.device | None) -> Tensor:
    """An empty stacked tensor whose slots lie in memory as ``one`` would: [N, *one.shape].

    On the device of ``one``, if no other is named.
    """
    alone = torch.empty_like(one, requires_grad=False, device="meta")
    return torch.empty_strided(
        (width, *alone.shape),
        (max(alone.numel(), 1), *alone.stride()),
        dtype=alone.dtype,
        device=device or one.device,
    )
