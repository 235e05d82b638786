"""What a user's file put into other modules, which a worker imports without: it goes along.

``nn.Linear.forward = mine``, ``F.gelu = lambda x: ...``, ``@library.register`` over a class of the
file: alone a model trains with these. Looked for are functions and classes that the file itself
defines, which go by value as the recipe's do; other values that it assigned there nobody can tell
from what their modules have of themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, cast

from shoal.source import MAINS, Change

_LEFT_OUT = frozenset((*sys.stdlib_module_names, "shoal", "__mp_main__", *MAINS))


def find_changes() -> tuple[Change, ...]:
    """All of them, in modules that are imported in this process."""
    found: list[Change] = []
    for name, module in list(sys.modules.items()):
        is_itself = isinstance(module, ModuleType) and vars(module).get("__name__") == name
        if is_itself and name.partition(".")[0] not in _LEFT_OUT:
            found += _changes_in(name, module)
    return tuple(found)


def _changes_in(module: str, of: ModuleType) -> Iterator[Change]:
    for name, value in list(vars(of).items()):
        if _is_of_file(value):
            yield Change(module, "", name, value)
        elif _is_class(value) and vars(value).get("__module__") == module:
            yield from _among(vars(value), module, value.__qualname__)
        elif type(value) is dict:
            yield from _among(value, module, name, is_item=True)


def _among(
    values: Mapping[Any, Any], module: str, path: str, *, is_item: bool = False
) -> Iterator[Change]:
    for name, value in list(values.items()):
        if _is_of_file(value) and type(name) is str:
            yield Change(module, path, name, value, is_item=is_item)


def _is_of_file(value: object) -> bool:
    """Whether a user's file defines it; a wrapper has its ``__module__`` from what it wraps.

    By types alone: what libraries have that is made when it is asked for is not asked.
    """
    if type(value) in (staticmethod, classmethod):
        value = cast(Any, value).__func__
    if type(value) is FunctionType:
        return value.__globals__.get("__name__") in MAINS
    return _is_class(value) and vars(value).get("__module__") in MAINS


def _is_class(value: object) -> bool:
    return issubclass(type(value), type)
