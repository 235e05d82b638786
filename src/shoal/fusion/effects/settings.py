"""What the making of a trial sets where steps find it: there is one of each for all slots.

Settings of the whole process are among that.

[Note: what counts] Told is all that code of steps can reach, as deep as it is, and what only the
making of trials reads (``cfg.lr``) is to count for nothing. An attribute counts where code of
steps has its name. A container has no names that code must have: with ``cfg.table`` counts all
that is in it, ``cfg.table[kind]`` or ``f(**cfg.table)``. So do the cells and defaults of a
function, and what a library's object has, which is read by code of others. Of functions their code
counts too, and of what is in a place beyond so many values a digest of all (``digests.py``).
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import decimal
import enum
import fractions
import functools
import hashlib
import operator
import pathlib
import re
import threading
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.codes import names_in
from shoal.fusion.effects.globals import LONG, MAKING, followed
from shoal.fusion.effects.processwide import (
    changed_by,
    found_in_libraries,
    set_in_libraries,
    settings_of_process,
)
from shoal.fusion.matching.digests import Digests, of_code
from shoal.fusion.matching.signature import DEEPEST
from shoal.pystate import ambient
from shoal.pystate.ofthread import parts_of_thread
from shoal.pystate.parts import SPACES, attributes_of, function_parts, has_attributes, hidden_of
from shoal.pystate.standins import declared_in
from shoal.recipes.libraries import is_library
from shoal.recipes.recipe import Recipe
from shoal.rng import process_streams

PLAIN = (bool, int, float, str, bytes, complex, type(None))
MOST = 2_000
"""Values that are looked at of one place."""
WORDY = 200  # letters that are kept as they are
_SAID = (
    *(np.generic, torch.dtype, torch.device, torch.Size, range, slice),
    *(pathlib.PurePath, decimal.Decimal, fractions.Fraction),
)
"""Types whose objects are told by what they print."""
_WHOLE = (Tensor, np.ndarray, nn.Module, enum.Enum, type, types.BuiltinFunctionType)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
_LISTS = (list, tuple, collections.deque)
_HOLDERS = (collections.UserDict, collections.UserList, collections.ChainMap)
_BY_NAME = (
    *("getattr", "vars", "__dict__", "attrgetter", "asdict", "astuple", "fields", "dir"),
    *("__getattribute__", "getmembers", "globals", "locals"),
)
"""What reads attributes whose names are in no code."""
_READERS = (getattr, vars, dir, operator.attrgetter, dataclasses.asdict, dataclasses.astuple)
"""The same by another name."""
_IN_FORMAT = re.compile(r"[.\[](\w+)")  # "{0.scale}".format(cfg)


def configuration(recipe: Recipe, module: nn.Module) -> dict[str, str]:
    """What code of steps finds in globals, on classes and in what functions close over, by place.

    What a factory sets there for its trial, the next trial's factory sets anew: one process has
    one of each. In words that two processes agree on.
    """
    here = ambient.here()
    functions = list(followed(recipe, module, MAKING))
    named = dict(_named_by(functions))
    asked = here.asked | {name for one in functions for name in names_in(one.__code__)}
    texts = [*asked, *(one for one in named.values() if isinstance(one, str))]
    asked |= {name for one in texts if "{" in one for name in _IN_FORMAT.findall(one)}
    if any(one in _READERS for one in named.values() if isinstance(one, Hashable)):
        asked |= {"getattr"}
    kinds = {owner for child in module.modules() for owner in type(child).__mro__}
    owners = [(f"{k.__module__}.{k.__qualname__}", vars(k)) for k in kinds if not is_library(k)]
    places = named | found_in_libraries(functions, kinds, asked)
    for where, held in (*owners, *here.making.held()):
        places |= {f"{where}.{name}": value for name, value in held.items()}
    telling = _Telling(asked, module)
    telling.found |= settings_of_process(asked)
    makers = here.makers()
    for home in changed_by(makers):
        telling.found[f"what {home.__name__} holds"] = Digests().of(declared_in(home))
    for place, value in set_in_libraries(makers).items():
        telling.tell(place, value, counts=True)
    packages = collections.defaultdict[str, list[str]](list)
    for place, value in places.items():
        if _is_of_package(value):
            packages[place.rpartition(".")[0]].append(f"{place}={_called(value)}")
        else:
            telling.tell(place, value)
    for where, code in packages.items():
        telling.found[f"code in {where}"] = _short(" ".join(sorted(code)))
    return dict(sorted(telling.found.items(), key=lambda item: len(item[0])))  # a plan has one


def _named_by(functions: Iterable[types.FunctionType]) -> Iterator[tuple[str, Any]]:
    """By ``module.name`` the values of globals that they name, or that they ask for at once."""
    for one in functions:
        known, names = one.__globals__, set(names_in(one.__code__))
        for name in sorted(known if "globals" in names else names & known.keys()):
            yield f"{known.get('__name__', '')}.{name}", known[name]


class _Telling:
    """Tells of values what counts.

    Args:
        asked: The names that code of steps has.
        module: The trial's own, which is looked after elsewhere.
    """

    def __init__(self, asked: frozenset[str], module: nn.Module) -> None:
        own = (*module.modules(), *module.parameters(), *module.buffers(), *process_streams())
        self.found: dict[str, str] = {}
        self._asked, self._by_name = asked, not asked.isdisjoint(_BY_NAME)
        self._above = {id(one) for one in own}  # and what is looked into at the moment
        self._form = functools.cache(_form)
        self._kept = {id(one) for one in _kept_by(module) if not isinstance(one, PLAIN)}
        self._left, self._digests = MOST, Digests({id(one) for one in own})
        self._more: list[str] = []  # digests of what of a place is beyond that

    def tell(self, place: str, value: Any, *, counts: bool = False) -> None:
        """Of a value and all within, each at a place of its own."""
        self._left, self._more = MOST, []
        self._look(place, value, counts or self._is_asked(place.rpartition(".")[2]), 0)
        if self._more:
            self.found[f"{place} and more"] = _short(" ".join(self._more))

    def _is_asked(self, name: str) -> bool:
        return self._by_name or name in self._asked

    def _look(self, place: str, value: Any, counts: bool, depth: int) -> None:
        with suppress(Exception):  # an object that lets nobody look
            self._tell(place, value, counts, depth)

    def _tell(self, place: str, value: Any, counts: bool, depth: int) -> None:
        if isinstance(value, contextvars.ContextVar):
            value = value.get(None)  # what code calls by the variable's name
        self._left -= 1
        if id(value) in self._above:
            return
        kind: Any = type(value)
        form, counts = self._form(kind), counts or id(value) in self._kept
        if form == "whole" or (form == "list" and _is_flat(value)) or form == "unknown":
            if counts:
                self._say(place, self._in_words(value))
            return
        is_too_much = depth > DEEPEST or self._left < 0 or _is_long(value, form)
        if is_too_much and counts and form != "object":
            self._say(place, self._digests.of(value))
        if is_too_much and form != "object":
            return
        parts = dict(_attributes(value) if form == "object" else _inside(value, form))
        asked = [name for name in parts if self._is_asked(name)] if form == "object" else []
        if form == "object" and len(parts) > LONG:
            parts = {name: parts[name] for name in asked}
        if is_too_much:
            if asked:
                self._say(place, self._digests.of([(name, parts[name]) for name in asked]))
            return
        if asked or counts:
            told = sorted(asked) if form == "object" else _does(value) or list(parts)
            self._say(place, f"{_called(value)} {_short(str(told))}")
        self._above.add(id(value))
        try:
            for name, one in parts.items():
                is_asked = self._is_asked(name) or (counts and form != "object")
                self._look(f"{place}.{name}", one, is_asked, depth + 1)
        finally:
            self._above.remove(id(value))

    def _say(self, place: str, words: str) -> None:
        if self._left < 0:
            self._more.append(words)
        else:
            self.found[place] = words

    def _in_words(self, value: Any) -> str:
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, type | types.BuiltinFunctionType):
            return _called(value)
        if isinstance(value, nn.Module):
            return f"a module, {self._digests.of(_kept_in(value))}"
        if isinstance(value, (*PLAIN, *_SAID)):
            return _short(repr(value))
        return f"{_called(value)} {self._digests.of(value)}"


def _is_long(value: Any, form: str) -> bool:
    return form in ("list", "dict") and len(value) > LONG


def _does(value: Any) -> str:
    """What a function's code is; of others nothing."""
    return of_code(value.__code__) if isinstance(value, types.FunctionType) else ""


def _form(kind: Any) -> str:
    """How values of a type are told of: at once (whole), by what is in them, or by a digest."""
    if issubclass(kind, (*PLAIN, *_SAID, *_WHOLE)):
        return "whole"
    if issubclass(kind, (*_LISTS, set, frozenset)):
        return "list"
    if issubclass(kind, dict | types.MappingProxyType):
        return "dict"
    if issubclass(kind, _CODE):
        return "code"
    if issubclass(kind, _HOLDERS) or kind.__module__.partition(".")[0] == "torch":
        return "held"
    if issubclass(kind, (*SPACES, threading.local)):
        return "object"
    return "object" if has_attributes(kind) and ambient.is_users(kind) else "unknown"


def _is_flat(held: Any) -> bool:
    """Whether a list or set has numbers and texts alone."""
    return all(isinstance(one, PLAIN) for one in held)


def _is_of_package(value: Any) -> bool:
    """Whether it is code that nobody looks into: there is a lot of it."""
    if not isinstance(value, _NAMED):
        return isinstance(value, (*_WRAPPERS, types.MethodDescriptorType)) and not _users_in(value)
    return not ambient.is_users(value)


def _users_in(wrapper: Any) -> bool:
    """Whether a function of the user's is in what wraps one."""
    inner = (getattr(wrapper, name, None) for name in ("__wrapped__", "fget", "func"))
    return any(isinstance(one, types.FunctionType) and ambient.is_users(one) for one in inner)


def _called(value: Any) -> str:
    """The name of code, or of its type."""
    of: Any = value if isinstance(value, _NAMED) else type(value)
    return f"{of.__module__}.{of.__qualname__}"


def _short(words: str) -> str:
    return words if len(words) <= WORDY else hashlib.sha256(words.encode()).hexdigest()


def _kept_in(module: nn.Module) -> dict[str, Any]:
    """Its tensors, and the attributes of all modules in it."""
    found = dict[str, Any](module.named_parameters()) | dict(module.named_buffers())
    for path, child in module.named_modules():
        hidden = hidden_of(child)
        found |= {f"{path} {name}": v for name, v in vars(child).items() if name not in hidden}
    return found


def _kept_by(module: nn.Module) -> Iterator[Any]:
    """What its modules keep, by itself or in tuples: code finds it there by another name."""
    for child in module.modules():
        hidden = hidden_of(child)
        for name, value in vars(child).items():
            if name not in hidden:
                yield from (value, *(value if isinstance(value, tuple) else ()))
                if isinstance(value, types.MethodType):
                    yield value.__self__


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Those of an object; of what is a thread's own, this one's."""
    is_threads = isinstance(value, threading.local)
    parts = parts_of_thread(value) if is_threads else attributes_of(value)
    yield from ((name, one) for name, one in parts.items() if not name.startswith("__"))


def _inside(value: Any, form: str) -> Iterator[tuple[str, Any]]:
    """What is in a container, what a function keeps, and what a library's object has."""
    if form == "list" and not isinstance(value, set | frozenset):
        yield from ((str(number), one) for number, one in enumerate(value))
    elif form == "dict":
        held = value if isinstance(value, dict) else dict(value)
        yield from _visible({_key(key): one for key, one in dict.items(held)})
        if has_attributes(type(value)):
            yield from _visible(attributes_of(value))
    elif form == "held" and has_attributes(type(value)):
        yield from _visible(attributes_of(value))
    elif isinstance(value, types.FunctionType) and not is_library(value):
        for name, one in function_parts(value, every_default=True).items():
            yield name.rstrip(" ="), one
    elif isinstance(value, staticmethod | classmethod | functools._lru_cache_wrapper):
        yield "function", getattr(value, "__wrapped__", None)
    elif isinstance(value, property):
        yield from (("fget", value.fget), ("fset", value.fset))
    elif isinstance(value, functools.cached_property):
        yield "func", value.func
    elif isinstance(value, functools.partial | functools.partialmethod):
        yield from (("func", value.func), ("args", value.args), ("named", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("func", value.__func__), ("self", value.__self__))


_WRAPPERS = (
    *(functools.partialmethod, functools.cached_property, functools._lru_cache_wrapper),
    *(staticmethod, classmethod, property),
)
_CODE = (
    *_WRAPPERS,
    *(types.FunctionType, types.MethodType, functools.partial, types.ModuleType),
)


def _key(key: Any) -> str:
    """Of an entry: itself where it is a text."""
    if isinstance(key, str):
        return key
    if isinstance(key, PLAIN):
        return f"[{key!r}]"
    return f"[{_called(key)} {Digests().of(key)}]"


def _visible(held: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if len(held) <= LONG:
        yield from ((name, one) for name, one in held.items() if not name.startswith("__"))
