"""Functions that have a backward of their own (``torch.autograd.Function``), slot by slot.

Torch batches those alone that say how. No mode sees them, so their ``apply`` has other code while
the code of an array runs. It is the same function still, since ``square = Square.apply`` at the
head of a file, as torch's own pages have it, keeps that.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import _pop_mode_temporarily
from torch.utils.checkpoint import CheckpointFunction

from shoal.fusion.declined import Unbatched
from shoal.fusion.passes.slots import Slots

RUNS_AGAIN = (
    "the model's code runs again in the backward (checkpointing, or a hook), where it cannot for "
    "all slots at once."
)
ESCAPED = ("batched_level", "BatchedTensor", "vmap", "functorch", "mode stack")


@contextmanager
def functions_by_slot(slots: Slots) -> Iterator[None]:
    """Inside, functions that torch cannot batch run for each slot of ``slots`` by itself."""
    everyones: Any = vars(Function)["apply"].__func__
    given = _copied(everyones)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        alone = functools.partial(given, cls)
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

    if everyones.__code__.co_freevars != _INSTEAD.co_freevars:  # a torch that wrote it otherwise
        with _another_apply(classmethod(apply)):
            yield
        return
    everyones.__code__, everyones.__kwdefaults__ = _INSTEAD, {"instead": apply}
    try:
        yield
    finally:
        everyones.__code__, everyones.__kwdefaults__ = given.__code__, given.__kwdefaults__


@contextmanager
def _another_apply(another: Any) -> Iterator[None]:
    """One that nobody has who has kept torch's."""
    owner: Any = Function
    known = vars(owner)["apply"]
    owner.apply = another
    try:
        yield
    finally:
        owner.apply = known


def _copied(function: Any) -> Any:
    """The same function, which stays as it is when that one gets other code."""
    parts = (function.__name__, function.__defaults__, function.__closure__)
    copy = types.FunctionType(function.__code__, function.__globals__, *parts)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _of_the_same_cells(__class__: type) -> types.CodeType:
    """Code for torch's function, which has a cell for its ``super()``."""

    def apply(cls: Any, *args: Any, instead: Any, **kwargs: Any) -> Any:
        assert __class__ is Function
        return instead(cls, *args, **kwargs)

    return apply.__code__


_INSTEAD = _of_the_same_cells(Function)
