"""What the code of a trial keeps in globals of its modules: there is one of each for all slots."""

from __future__ import annotations

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

from shoal.bound import code_of
from shoal.fusion.signature import DEEPEST, described
from shoal.pystate import ambient
from shoal.pystate.parts import SPACES, attributes_of
from shoal.recipe import Recipe
from shoal.spelled import code_met, is_library, names_in, stored_in

LONG = 1000
"""Items of which nobody looks at each."""
PLAIN = (bool, int, float, str)
SMALL = 2**16  # bytes of a tensor whose content is compared
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
    for function in _followed(recipe, module, leave_out):
        for name in sorted(set(names_in(function.__code__)) & function.__globals__.keys()):
            value = function.__globals__[name]
            if isinstance(value, DATA) or _is_users(value):
                found[f"{function.__globals__.get('__name__', '')}.{name}"] = value
    return found


def _followed(
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
            if isinstance(known[name], types.FunctionType):
                waiting.append(known[name])


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
    if (state := _random_state(value)) is not None:
        return state
    if depth > DEEPEST:
        return ""
    inside: Iterable[Any] = ()
    if isinstance(value, list | tuple | deque):
        inside = value
    elif isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, types.FunctionType):
        inside = [cell.cell_contents for cell in value.__closure__ or ()]
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


def configuration(recipe: Recipe, module: nn.Module) -> dict[str, str]:
    """The plain values that the code of steps finds in globals and on classes, by place.

    What a factory sets there for its trial, the next trial's factory sets anew: one process has
    one of each. In words that two processes agree on; entries of a dict or an object each by
    itself. Of what code names at all those count whose last name code of steps has, whoever leads
    it there: a default, an attribute of the model, a method of the object's own.
    """
    here = ambient.here()
    asked = here.asked | {
        n for f in _followed(recipe, module, MAKING) for n in names_in(f.__code__)
    }
    kinds = {owner for child in module.modules() for owner in type(child).__mro__}
    owners = [(f"{k.__module__}.{k.__qualname__}", vars(k)) for k in kinds if not is_library(k)]
    held = [
        (f"{where}.{n}", one)
        for where, of in (*owners, *here.making.held())
        for n, one in of.items()
    ]
    found = _assigned_code(recipe, module)
    for place, value in (*kept_globals(recipe, module, MAKING).items(), *held):
        name, values = place.rpartition(".")[2], _plain_values(place, value)
        found |= {k: one for k, one in values.items() if _is_asked(k, name, value, asked)}
    return found


def _is_asked(place: str, name: str, value: Any, asked: frozenset[str]) -> bool:
    """Whether code names it; who has a container may ask for all that is in it, as ``getattr``."""
    if not asked.isdisjoint(_BY_NAME):
        return True
    is_container = isinstance(value, dict | list | tuple)
    return place.rpartition(".")[2] in asked or (is_container and name in asked)


_BY_NAME = ("getattr", "vars", "__dict__", "attrgetter", "asdict")
"""What reads attributes whose names are in no code."""


def _assigned_code(recipe: Recipe, module: nn.Module) -> dict[str, str]:
    """The functions, classes and types in globals that the recipe's code assigns."""
    given = (code_of(value) for value in vars(recipe).values() if callable(value))
    assigned = {
        (id(one.__globals__), name)
        for one in code_met(given)
        if isinstance(one, types.FunctionType) and not is_library(one)
        for name in stored_in(one.__code__)
    }
    found = {}
    for function in _followed(recipe, module, MAKING):
        known = function.__globals__
        for name in sorted(set(names_in(function.__code__)) & known.keys()):
            value = known[name]
            if (id(known), name) in assigned and not isinstance(value, DATA):
                called = getattr(value, "__qualname__", None) or repr(value)
                place = f"{known.get('__name__', '')}.{name}"
                found[place] = f"{getattr(value, '__module__', '')}.{called}"
    return found


def _plain_values(name: str, value: Any, depth: int = 0) -> dict[str, str]:
    if value is None or isinstance(value, PLAIN):
        return {name: repr(value)}
    if isinstance(value, Tensor) and value.layout == torch.strided and value.nbytes <= SMALL:
        return {name: described(value)}
    if isinstance(value, list | tuple) and all(isinstance(one, PLAIN) for one in value[:LONG]):
        return {name: repr(value)} if len(value) <= LONG else {}
    inside: Any = value if isinstance(value, dict | types.MappingProxyType) else None
    if isinstance(value, list | tuple):
        inside = {str(number): one for number, one in enumerate(value)}
    elif inside is None and (_is_users(value) or isinstance(value, SPACES)):
        inside = attributes_of(value)
    if inside is None or depth > DEEPEST or len(inside) > LONG:
        return {}
    found: dict[str, str] = {}
    for key, item in list(inside.items()):
        if isinstance(key, str) and not key.startswith("__"):
            found |= _plain_values(f"{name}.{key}", item, depth + 1)
    return found
