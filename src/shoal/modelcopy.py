"""Copies of modules whose functions call the copy's parts, and not those of the original."""

from __future__ import annotations

import copy
import types
from typing import Any, TypeVar

from torch import nn

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
            if isinstance(kept, types.FunctionType) and closed_over(kept, nn.Module):
                vars(part)[name] = _around_copies(kept, memo)
    return made


def closed_over(function: types.FunctionType, kind: type[T]) -> list[T]:
    """What of a type a function closes over."""
    contents = map(_content, function.__closure__ or ())
    return [value for value in contents if isinstance(value, kind)]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


def _around_copies(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    def of_copy(cell: types.CellType) -> types.CellType:
        content = _content(cell)
        is_copied = isinstance(content, nn.Module) and id(content) in memo
        return types.CellType(memo[id(content)]) if is_copied else cell

    code, cells = function.__code__, tuple(map(of_copy, function.__closure__ or ()))
    made = types.FunctionType(code, function.__globals__, function.__name__, None, cells)
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    vars(made).update(vars(function))
    return made
