"""Copies of modules whose functions call the copy's parts, and not those of the original."""

from __future__ import annotations

import copy
import types
from typing import Any, TypeVar

from torch import nn

from shoal.core.closures import closed_over

T = TypeVar("T")


def deepcopied(value: T, memo: dict[int, Any]) -> T:
    """``copy.deepcopy`` of a module, or of what has one, functions in its attributes included.

    A function is its own deep copy: ``self.mlp = lambda x: fc(x)``, made in a module's
    ``__init__``, would go on with the layer that it closes over, the original's.
    """
    made = copy.deepcopy(value, memo)
    parts = [module for module in list(memo.values()) if isinstance(module, nn.Module)]
    for part in {id(module): module for module in parts}.values():
        for name, kept in vars(part).items():
            if isinstance(kept, types.FunctionType) and kept.__closure__:
                vars(part)[name] = _around_copies(kept, memo)
    return made


def _around_copies(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    copied = {
        name: types.CellType(memo[id(value)])
        for name, value in closed_over(function).items()
        if isinstance(value, nn.Module) and id(value) in memo
    }
    if not copied:
        return function
    code = function.__code__
    own = zip(code.co_freevars, function.__closure__ or (), strict=True)
    cells = tuple(copied.get(name, cell) for name, cell in own)
    made = types.FunctionType(code, function.__globals__, function.__name__, None, cells)
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    vars(made).update(vars(function))
    return made
