"""Who wrote code: Python, NumPy or torch, an installed package, or somebody else, as the user."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Iterable
from typing import Any

LIBRARIES = frozenset((*sys.stdlib_module_names, "numpy", "torch"))
_STANDARD = tuple(os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Directories of installed packages."""


def is_installed(file: str) -> bool:
    """Whether a file is an installed package's."""
    return any(name in file for name in INSTALLED)


def is_library(value: Any) -> bool:
    """Whether somebody else wrote it, who knows nothing of the user's names."""
    if isinstance(value, types.ModuleType):
        module = value.__name__
    elif isinstance(value, types.FunctionType):  # a wrapper has its __module__ from what it wraps
        module = value.__globals__.get("__name__") or ""
    else:
        module = getattr(value, "__module__", None) or ""
        if not isinstance(module, str):  # of a type that is made in C, what its objects have
            return False
    return module != "__main__" and _is_of_library(module.partition(".")[0])


@functools.cache
def _is_of_library(package: str) -> bool:
    """Whether a package is one of those, and no file of the user's of the same name."""
    if package not in LIBRARIES:
        return False
    file = getattr(sys.modules.get(package), "__file__", None)
    if package in ("numpy", "torch") or file is None:
        return True
    return bool(os.path.realpath(file).startswith(_STANDARD))


def module_of(function: Any) -> types.ModuleType | None:
    """Where a function is from, a method, or the class of what is called as one; else None."""
    if isinstance(function, types.MethodType | staticmethod | classmethod):
        function = function.__func__
    if isinstance(function, types.FunctionType):
        return sys.modules.get(str(function.__globals__.get("__name__")))
    if isinstance(function, types.BuiltinFunctionType):
        return sys.modules.get(str(function.__module__))
    kind: Any = type(function)
    is_called = not isinstance(function, type) and any("__call__" in vars(k) for k in kind.__mro__)
    return sys.modules.get(str(kind.__module__)) if is_called else None


def found_along(found: Any, names: Iterable[str]) -> Any:
    """What an object has by one name after the other, None where it has none; no code runs."""
    for name in names:
        try:
            found = inspect.getattr_static(found, name)
        except Exception:  # whatever looking at it raises
            return None
    return found
