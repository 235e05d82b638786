"""What a whole process has one of, and steps may find: settings, and what libraries hold."""

from __future__ import annotations

import builtins
import os
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
from torch import _tensor_str

from shoal.core.codes import called_for_effect, modules_it_may_set, names_in, set_by
from shoal.kernels.kernelchoice import KernelChoice
from shoal.pystate.ambient import is_users
from shoal.recipes.libraries import found_along, is_library, module_of

_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
_CONSTANT = (bool, int, float, str, bytes, type(None))


def settings_of_process(asked: Collection[str]) -> dict[str, str]:
    """In words; of the environment and the command line where code has their names."""
    found = {name: repr(value) for name, value in KernelChoice.here().called().items()}
    found["the working directory"] = _working_directory()
    found["how numbers are printed"] = f"{np.get_printoptions()} {vars(_tensor_str.PRINT_OPTS)}"
    if not {"environ", "getenv", "environb"}.isdisjoint(asked):
        values = {name: _of_environment(name) for name in asked}
        values = {n: value for n, value in values.items() if n.isupper() or value is not None}
        found |= {f"os.environ[{name!r}]": repr(value) for name, value in values.items()}
    if "argv" in asked:
        found["sys.argv"] = repr(sys.argv)
    return found


def _of_environment(name: str) -> str | None:
    try:
        return os.environ.get(name)
    except UnicodeEncodeError:  # no name of this locale's
        return None


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # somebody has removed it
        return ""


def changed_by(functions: Iterable[types.FunctionType]) -> list[types.ModuleType]:
    """Modules of installed packages that these may change.

    They call functions of theirs for what these do there (``gin.parse_config(...)``: nobody needs
    what it returns), or name them and set something (``setattr(package, "rate", 3)``).
    """
    found = dict[str, types.ModuleType]()
    for function in functions:
        code, known = function.__code__, function.__globals__
        homes = [module_of(_found(function, path)) for path in called_for_effect(code)]
        named = [known.get(name, sys.modules.get(name)) for name in modules_it_may_set(code)]
        for home in (*homes, *named):
            if not isinstance(home, types.ModuleType) or is_library(home) or is_users(home):
                continue
            found[home.__name__] = home
    return [one for name, one in found.items() if name.partition(".")[0] != "shoal"]


def set_in_libraries(functions: Iterable[types.FunctionType]) -> dict[str, Any]:
    """What these assign in modules and classes that are no user's, by place: as it is now."""
    found = dict[str, Any]()
    for function in functions:
        for path in set_by(function.__code__):
            home = _found(function, path[:-1])
            if home is os or not isinstance(home, types.ModuleType | type):
                continue
            if not is_users(home):
                found[f"{_called(home, '.'.join(path[:-1]))}.{path[-1]}"] = vars(home).get(
                    path[-1]
                )
    return found


def _found(function: types.FunctionType, path: tuple[str, ...]) -> Any:
    return found_along(function.__globals__.get(path[0]), path[1:])


def found_in_libraries(
    functions: Iterable[types.FunctionType], kinds: Iterable[type], asked: Collection[str]
) -> dict[str, Any]:
    """What code reads of modules and ``kinds`` that are no user's, and what is there: by place.

    Constants, functions and classes, as far as names in the code lead.
    """
    asked, found = frozenset(asked), dict[str, Any]()
    waiting = deque[tuple[str, Any]]([("builtins", builtins)])
    waiting += [(f"{kind.__module__}.{kind.__qualname__}", kind) for kind in kinds]
    for one in functions:
        known = one.__globals__
        waiting += [(name, known[name]) for name in names_in(one.__code__) if name in known]
    met = set[int]()
    while waiting:
        where, holder = waiting.popleft()
        if id(holder) in met or not isinstance(holder, (types.ModuleType, *_CODE)):
            continue
        met.add(id(holder))
        is_named = isinstance(getattr(holder, "__module__", ""), str)
        if not is_named or not hasattr(holder, "__dict__") or is_users(holder):
            continue
        for name, value in _held(holder, asked):
            place = f"{_called(holder, where)}.{name}"
            if isinstance(value, (*_CODE, *_CONSTANT)):
                found[place] = value
            waiting.append((place, value))
    return found


def _held(holder: Any, asked: frozenset[str]) -> Iterator[tuple[str, Any]]:
    kinds = holder.__mro__ if isinstance(holder, type) else (holder,)
    for held in map(vars, kinds):
        yield from ((n, held[n]) for n in sorted(asked & held.keys()) if not n.startswith("__"))


def _called(holder: Any, where: str) -> str:
    return holder.__name__ if isinstance(holder, types.ModuleType) else where
