"""What the code of a trial keeps in globals of its modules: there is one of each for all slots."""

from __future__ import annotations

import functools
import itertools
import random
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, MutableMapping, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shoal.core.closures import contents_of
from shoal.core.codes import names_in
from shoal.fusion.matching.signature import DEEPEST, described
from shoal.pystate.fingerprints import of_numbers
from shoal.recipes.bound import code_of
from shoal.recipes.libraries import is_library
from shoal.recipes.recipe import Recipe

LONG = 1000
"""Items of which nobody looks at each."""
MAKING = frozenset(("__init__", "__new__"))
"""Methods that make a model, and are no part of its steps."""
_counter = itertools.count()
_numbers: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
"""Of tensors that were looked at: one that is made where another was has its address."""
DATA = (Tensor, dict, list, set, deque, bool, int, float, str, type(None))


def kept_globals(
    recipe: Recipe, module: nn.Module, leave_out: Collection[str] = ()
) -> dict[str, Any]:
    """By ``module.name`` the values of globals that the user's code names, and that may change.

    Followed are the functions that functions name, from the recipe's and the methods of the
    model's classes on, but for those called as ``leave_out``; what libraries define and keep is
    left out.
    """
    found: dict[str, Any] = {}
    for function in followed(recipe, module, leave_out):
        for name in sorted(set(names_in(function.__code__)) & function.__globals__.keys()):
            value = function.__globals__[name]
            if isinstance(value, DATA) or _is_users(value):
                found[f"{function.__globals__.get('__name__', '')}.{name}"] = value
    return found


def followed(
    recipe: Recipe, module: nn.Module, leave_out: Collection[str]
) -> Iterator[types.FunctionType]:
    """The functions of a step, and those that they name."""
    waiting, met = deque(_code_of(recipe, module)), set[int]()
    while waiting:
        function = waiting.popleft()
        if id(function) in met or is_library(function) or function.__name__ in leave_out:
            continue
        met.add(id(function))
        yield function
        known = function.__globals__
        for name in sorted(set(names_in(function.__code__)) & known.keys()):
            value = known[name]
            if isinstance(value, functools._lru_cache_wrapper):
                value = value.__wrapped__
            if isinstance(value, types.FunctionType):
                waiting.append(value)


def global_settings(recipe: Recipe, module: nn.Module) -> dict[str, str]:
    """The same in words that tell one moment from another; of long ones how long they are."""
    told = {}
    for name, value in kept_globals(recipe, module).items():
        is_long = isinstance(value, Sized) and not isinstance(value, Tensor) and len(value) > LONG
        shown = list(value) if isinstance(value, deque) else value
        words = f"{len(value)} items" if is_long else f"{described(shown)} {identity(value)}"
        told[f"the global {name!r}"] = words
    return told


def identity(value: Any, depth: int = 0) -> str:
    """What ``described`` does not tell: floats, and which tensor it is and how often written."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Tensor):
        return f"{_numbers.setdefault(value, next(_counter))} {value._version}"
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return str(of_numbers(value))
    if (state := _random_state(value)) is not None:
        return state
    if depth > DEEPEST:
        return ""
    inside: Iterable[Any] = ()
    if isinstance(value, list | tuple | deque):
        inside = value
    elif isinstance(value, dict):
        inside = dict.values(value)
    elif isinstance(value, types.FunctionType):
        inside = contents_of(value.__closure__)
    elif type(value).__dictoffset__ and not isinstance(value, type | types.ModuleType | nn.Module):
        inside = vars(value).values()
    return " ".join(identity(item, depth + 1) for item in inside)


def _random_state(value: Any) -> str | None:
    """Where a random generator stands; None of anything else."""
    if isinstance(value, random.Random):
        return str(hash(value.getstate()))
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr([*map(str, value.get_state(legacy=False).values())])
    return repr(value.get_state().tolist()) if isinstance(value, torch.Generator) else None


def _code_of(recipe: Recipe, module: nn.Module) -> Iterator[types.FunctionType]:
    """The functions where a trial's step begins."""
    for value in (code_of(recipe.loss), code_of(recipe.inputs), recipe.step):
        yield from _functions((value, getattr(value, "__func__", None)))
        yield from _methods(type(value))
    for child in module.modules():
        yield from _functions(vars(child).values())
    for kind in {type(child) for child in module.modules()}:
        yield from _methods(kind)


def _methods(kind: type) -> Iterator[types.FunctionType]:
    for owner in kind.__mro__:
        if not is_library(owner):
            yield from _functions(vars(owner).values())


def _functions(values: Iterable[Any]) -> Iterator[types.FunctionType]:
    return (value for value in values if isinstance(value, types.FunctionType))


def _is_users(value: Any) -> bool:
    """Whether it is an object of a class of the user's."""
    is_code = isinstance(value, type | types.ModuleType | nn.Module)
    return not is_code and bool(type(value).__dictoffset__) and not is_library(type(value))
