"""Models with code of their own for the change between training and evaluation.

``train`` and ``eval`` may be a model's own, and write to weights: those of LoRA merge what was
learnt into the weight for evaluation, and take it out again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.fusion.declined import Declined
from shoal.fusion.likeness import same_bits
from shoal.fusion.rows.installed import require_parameters
from shoal.fusion.rows.stacked import Stacked
from shoal.kernels.dispatched import run_operation
from shoal.recipes.modelchecks import switches_by_code


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Whatever that code does to the module's tensors, which are another one's, is undone."""
    if not switches_by_code(module):
        yield
        return
    tensors = [t for t in (*module.parameters(), *module.buffers()) if not _is_away(t)]
    before = [(tensor, tensor.data, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, data, values in before:
            tensor.data = data
            if not same_bits(tensor, values):
                with torch.no_grad():
                    tensor.copy_(values)


def _is_away(tensor: Tensor) -> bool:
    """Whether one number stands for all of it, to which nobody can write."""
    return tensor.numel() > 1 and not any(tensor.stride())


def switch(slot: int, member: Any, stacked: Stacked, training: bool) -> None:
    """Put a slot's module into a mode; what its code writes is in the slot's rows.

    Raises:
        Declined: it writes to what is there once for all, or puts other parameters in.
    """
    if not switches_by_code(member.module):
        member.train(training)
        return
    parameters = list(member.module.parameters())
    with _BaseStays({name: stacked.parameters[name][0] for name in stacked.base}):
        member.train(training)
    require_parameters(member.module, parameters)
    stacked.settle(slot, member.module)


class _BaseStays(TorchDispatchMode):
    """Lets nobody write to what all slots have once."""

    def __init__(self, base: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._places = [(t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in base.items()]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            for tensor in (leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, Tensor)):
                at = tensor.data_ptr()
                if name := next((n for start, end, n in self._places if start <= at < end), ""):
                    raise Declined(
                        f"the model's own train() or eval() writes to {name!r}, which is frozen "
                        "and there once for all trials."
                    )
        return run_operation(func, args, kwargs)
