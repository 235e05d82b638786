"""What a model's code returns for all slots, as each trial alone would have it.

Tensors may be anywhere in it: in containers, and in objects of the users' own. What else differs
between slots are floats of their code (``PerSlot``).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.fusion.rows.perslot import PerSlot

DEEPEST = 8
OPAQUE = (
    *(nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType),
    *(functools.partial, torch.Generator, torch.dtype, torch.device),
)
"""Objects that are handed on as they are."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor was: which of those that were taken out."""

    index: int


def taken_apart(output: Any) -> tuple[list[Tensor], Any]:
    """The tensors of an output, and the output with a ``Place`` for each of them."""
    tensors: list[Tensor] = []

    def take(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return Place(len(tensors) - 1)

    return tensors, _replaced(output, take)


def put_together(form: Any, slot: int, tensor_at: Callable[[int], Tensor]) -> Any:
    """A slot's own output, of the form that ``taken_apart`` left; ``tensor_at``: its tensors."""

    def put(value: Any) -> Any:
        if isinstance(value, Place):
            return tensor_at(value.index)
        return value.values[slot] if isinstance(value, PerSlot) else value

    return _replaced(form, put)


def by_slot(form: Any, rows: Sequence[Sequence[Tensor] | Tensor], width: int) -> list[Any]:
    """Every slot's own output; ``rows``: of each tensor those of the slots."""
    return [
        put_together(form, slot, lambda index, slot=slot: rows[index][slot])  # type: ignore[misc]
        for slot in range(width)
    ]


def _replaced(value: Any, change: Callable[[Any], Any], depth: int = 0) -> Any:
    """``value`` with what is in it changed; itself, where nothing is."""
    if isinstance(value, Tensor | PerSlot | Place):
        return change(value)
    if depth > DEEPEST:
        return value
    leaves, tree = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return _with_fields(value, change, depth)
    found = [_replaced(leaf, change, depth + 1) for leaf in leaves]
    if all(new is old for new, old in zip(found, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(found, tree)


def _with_fields(value: Any, change: Callable[[Any], Any], depth: int) -> Any:
    changed = {
        name: new
        for name in _fields(value)
        if (new := _replaced(old := getattr(value, name), change, depth + 1)) is not old
    }
    if not changed:
        return value
    made = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(made, name, new)  # also where it is frozen
    return made


def _fields(value: Any) -> list[str]:
    if isinstance(value, OPAQUE):
        return []
    names = list(getattr(value, "__dict__", ()))
    if dataclasses.is_dataclass(value):
        names += [field.name for field in dataclasses.fields(value) if field.name not in names]
    return [name for name in names if hasattr(value, name)]
