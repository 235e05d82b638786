"""Functions that have a backward of their own (``torch.autograd.Function``), slot by slot.

Torch batches those alone that say how. No mode sees them, so their ``apply`` is another one while
the code of an array runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import _pop_mode_temporarily
from torch.utils.checkpoint import CheckpointFunction

from shoal.fusion.declined import Unbatched
from shoal.fusion.slots import Slots

RUNS_AGAIN = (
    "the model's code runs again in the backward (checkpointing, or a hook), where it cannot for "
    "all slots at once."
)
ESCAPED = ("batched_level", "BatchedTensor", "vmap", "functorch", "mode stack")


@contextmanager
def functions_by_slot(slots: Slots) -> Iterator[None]:
    """Inside, functions that torch cannot batch run for each slot of ``slots`` by itself."""
    owner: Any = Function
    given = vars(owner)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        alone = given.__get__(None, cls)
        is_inside = torch._C._are_functorch_transforms_active() and slots.level.is_innermost
        if not is_inside or cls.generate_vmap_rule or cls.vmap is not Function.vmap:
            return alone(*args, **kwargs)

        if cls is CheckpointFunction:
            raise Unbatched(RUNS_AGAIN)

        def one(*args: Any, **kwargs: Any) -> Any:
            with _pop_mode_temporarily():
                try:
                    return alone(*args, **kwargs)
                except RuntimeError as error:
                    if not any(word in str(error) for word in ESCAPED):
                        raise
            raise Unbatched(
                f"{cls.__qualname__}, which is a torch.autograd.Function, reads parameters or "
                "runs modules of the model that are not among its arguments."
            )

        one.__qualname__ = one.__name__ = cls.__qualname__
        return slots.each(one, args, kwargs)

    owner.apply = classmethod(apply)
    try:
        yield
    finally:
        owner.apply = given
