"""Hooks that code puts on tensors as it runs, which an array has no gradients of a trial's for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

HOOKED = (
    "the model's forward puts a hook on a tensor (register_hook), which would see the gradients "
    "of all slots, or none. A torch.autograd.Function can do the same."
)
_REGISTERING = ("register_hook", "register_post_accumulate_grad_hook")


@contextmanager
def tensor_hooks() -> Iterator[list[Tensor]]:
    """Tensors that were given a hook inside."""
    hooked: list[Tensor] = []
    before = {name: getattr(Tensor, name) for name in _REGISTERING}

    def noted(register: Any) -> Any:
        def noting(tensor: Tensor, hook: Any) -> Any:
            hooked.append(tensor)
            return register(tensor, hook)

        return noting

    for name, register in before.items():
        setattr(Tensor, name, noted(register))
    try:
        yield hooked
    finally:
        for name, register in before.items():
            setattr(Tensor, name, register)
