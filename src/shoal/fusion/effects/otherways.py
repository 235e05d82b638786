"""A forward as it may go with a later batch: other values of Python, other answers of tensors."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from shoal.core.codes import codes_in, names_in
from shoal.fusion.batches import changed_by
from shoal.fusion.effects.globals import MAKING
from shoal.fusion.passes.mode import ASKING, READING
from shoal.recipes.libraries import is_library
from shoal.recipes.recipe import Batch, Fed, Recipe, model_inputs

MOST_ANSWERS = 64
"""After so many other answers a loop that waits for one has the true ones."""
MOST_WAYS = 8
"""So many answers are given another value each by itself: a check before them may raise."""
_VALUES = (int, float, str)  # and bool
_WRITING = frozenset(
    (
        *("setattr", "__dict__", "append", "appendleft", "extend", "insert", "update", "add"),
        *("setdefault", "pop", "popleft", "clear", "copy_", "add_", "mul_", "fill_", "lerp_"),
    )
)
"""Names in code that writes to what an attribute holds."""


def may_keep(module: nn.Module) -> bool:
    """Whether code of a module, but for making it, seems to write to attributes."""
    methods = (
        v for kind in type(module).__mro__ if not is_library(kind) for v in vars(kind).items()
    )
    functions = (inspect.unwrap(v) for name, v in methods if callable(v) and name not in MAKING)
    return any(_keeps(f.__code__) for f in functions if isinstance(f, types.FunctionType))


@functools.lru_cache(maxsize=4096)
def _keeps(code: types.CodeType) -> bool:
    steps = (step.opname for one in codes_in(code) for step in dis.get_instructions(one))
    return not _WRITING.isdisjoint(names_in(code)) or any(
        step in ("STORE_ATTR", "STORE_SUBSCR", "DELETE_ATTR") for step in steps
    )


def other_ways(
    recipe: Recipe, batch: Batch
) -> Iterator[tuple[Batch, AbstractContextManager[Any]]]:
    """Batches, each with what is to be entered whenever a forward runs with it.

    The model's code may raise then: it would not be given that.
    """
    args, kwargs = model_inputs(recipe, changed_by(torch.clone, batch))
    if any(isinstance(leaf, _VALUES) for leaf in tree_leaves((args, kwargs))):
        inner = batch.batch if type(batch) is Fed else batch
        yield Fed(tree_map(_another, args), tree_map(_another, kwargs), inner), nullcontext()
    yield batch, OtherAnswers()
    for which in range(MOST_WAYS):
        way = OtherAnswers(which)
        yield batch, way
        if way.asked <= which:  # code does not ask so often
            return


def with_other_numbers(batch: Batch) -> Batch:
    """A batch of the same shapes and kinds."""

    def other(tensor: Tensor) -> Tensor:
        turned = tensor.flip(list(range(tensor.dim())))
        return turned * 1.5 + 0.25 if tensor.is_floating_point() else turned

    return changed_by(other, batch)


class OtherAnswers(TorchFunctionMode):
    """Where code asks a tensor for its value it is told another one; or the ``only``-th time."""

    def __init__(self, only: int | None = None) -> None:
        super().__init__()
        self._only, self.asked = only, 0

    def __enter__(self) -> OtherAnswers:
        self.asked = 0
        entered: OtherAnswers = super().__enter__()  # type: ignore[no-untyped-call]
        return entered

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The operation itself, but for an answer."""
        result = func(*args, **(kwargs or {}))
        if func not in ASKING and func not in READING:
            return result
        number, self.asked = self.asked, self.asked + 1
        is_meant = number < MOST_ANSWERS if self._only is None else number == self._only
        return _another(result) if is_meant else result


def _another(value: Any) -> Any:
    """Another value of the same type; tensors and what else there is as they are."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 0 if value else 1
    if isinstance(value, float):
        return -value if value else 1.0
    if isinstance(value, str):
        return f"{value}?"
    if isinstance(value, list):
        return list(map(_another, value))
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return (value == 0).astype(value.dtype)
    return value
