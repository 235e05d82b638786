"""What captures the passes of a worker's trials, and keeps what several trials can have."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from shoal.fusion import signature_of
from shoal.fusion.blend import HIDDEN
from shoal.fusion.constants import RATES, constants_of
from shoal.fusion.signature import DEEPEST
from shoal.recipe import Recipe
from shoal.runtime.captured import CapturedUnits
from shoal.runtime.cudagraph import CapturedPass, CudaGraphs
from shoal.runtime.operations import OperationList, Operations, list_operations
from shoal.runtime.replay import Pass, Replay

MOST = 16  # lists of operations that are kept
TOLD: tuple[type, ...] = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    Tensor,
    torch.dtype,
    torch.device,
    type,
)
TOLD += (types.ModuleType, types.BuiltinFunctionType)


class Captures:
    """Of one device, for the trials of one recipe.

    A list of operations is made once for all trials whose code is the same to the last number;
    each of them compares it with its own eager passes before it trusts it. A CUDA graph is one
    trial's.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._recipe, self._device = recipe, device
        self._lists: dict[Hashable, OperationList] = {}

    def units(self, model: nn.Module) -> CapturedUnits:
        """What computes the passes of a trial."""
        code: list[Hashable] = []

        def make(what: Pass, leaves: Sequence[Tensor], key: Hashable) -> Replay:
            if self._device.type == "cuda":
                return CapturedPass(what, leaves, CudaGraphs(self._device))
            if not code:
                code.append(_code_of(self._recipe, model) if _is_told(model) else None)
            return Operations(what.model, what.trained, self._list((code[0], key), what, leaves))

        return CapturedUnits(model, self._recipe, self._device, make)

    def _list(
        self, key: tuple[Hashable, Hashable], what: Pass, leaves: Sequence[Tensor]
    ) -> OperationList:
        if key[0] is None:
            return list_operations(what, leaves)
        known = self._lists.get(key)
        if known is not None:
            return known
        made = list_operations(what, leaves)
        if made.shares and len(self._lists) < MOST:
            self._lists[key] = made
        return made


def _code_of(recipe: Recipe, model: nn.Module) -> Hashable:
    """All of the code that a list of its operations holds: what it is, and its numbers."""
    rates = tuple(
        (path, getattr(child, RATES[type(child)]))
        for path, child in model.named_modules()
        if type(child) in RATES
    )
    kinds = tuple(type(child) for child in model.modules())  # one made in a function has closures
    return kinds, signature_of(recipe, model), constants_of(recipe, model), rates


def _is_told(model: nn.Module) -> bool:
    """Whether the words for a model's code say all of what its modules keep."""
    inside = {id(child) for child in model.modules()}
    return all(
        name.endswith("_hooks") or name in HIDDEN or _told(value, inside)
        for child in model.modules()
        for name, value in vars(child).items()
    )


def _told(value: Any, inside: Set[int], depth: int = 0) -> bool:
    if value is None or isinstance(value, TOLD) or id(value) in inside:
        return True
    if depth >= DEEPEST or isinstance(value, nn.Module):
        return False
    parts: list[Any]
    if isinstance(value, dict):
        if not all(isinstance(key, str | int) for key in value):
            return False
        parts = list(value.values())
    elif isinstance(value, tuple | list):
        parts = list(value)
    elif isinstance(value, set | frozenset):
        return all(isinstance(item, str | int) for item in value)
    elif isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, types.MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, types.FunctionType):
        parts = [cell.cell_contents for cell in value.__closure__ or ()]
        parts += [value.__defaults__, value.__kwdefaults__]
    elif type(type(value)) is type and hasattr(value, "__dict__") and not _slotted(type(value)):
        parts = list(vars(value).values())
    else:
        return False
    return all(_told(part, inside, depth + 1) for part in parts)


def _slotted(kind: type) -> bool:
    return any(getattr(base, "__slots__", ()) for base in kind.__mro__)
