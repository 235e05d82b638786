"""What the making of a trial sets where steps find it: there is one of each for all slots.

[Note: what counts] Told is all that code of steps can reach, as deep as it is, and what only the
making of trials reads (``cfg.lr``) is to count for nothing. An attribute counts where code of
steps has its name. A container has no names that code must have: with ``cfg.table`` counts all
that is in it, ``cfg.table[kind]`` or ``f(**cfg.table)``. So do the cells and defaults of a
function, and what a library's object has, which is read by code of others.
"""

from __future__ import annotations

import collections
import contextvars
import decimal
import enum
import fractions
import functools
import hashlib
import itertools
import pathlib
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.codes import names_in
from shoal.fusion.globals import LONG, MAKING, followed, kept_globals
from shoal.fusion.signature import DEEPEST, described
from shoal.libraries import is_library
from shoal.pystate import ambient
from shoal.pystate.ofthread import parts_of_thread
from shoal.pystate.parts import SPACES, attributes_of, function_parts, has_attributes, hidden_of
from shoal.recipe import Recipe

PLAIN = (bool, int, float, str, bytes, complex, type(None))
SMALL = 2**16  # bytes of a tensor's numbers that are compared; of a larger one those in between
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
_BY_NAME = ("getattr", "vars", "__dict__", "attrgetter", "asdict")
"""What reads attributes whose names are in no code."""


def configuration(recipe: Recipe, module: nn.Module) -> dict[str, str]:
    """What code of steps finds in globals, on classes and in what functions close over, by place.

    What a factory sets there for its trial, the next trial's factory sets anew: one process has
    one of each. In words that two processes agree on.
    """
    here = ambient.here()
    asked = here.asked | {
        n for f in followed(recipe, module, MAKING) for n in names_in(f.__code__)
    }
    kinds = {owner for child in module.modules() for owner in type(child).__mro__}
    owners = [(f"{k.__module__}.{k.__qualname__}", vars(k)) for k in kinds if not is_library(k)]
    places = kept_globals(recipe, module, MAKING)
    for where, held in (*owners, *here.making.held()):
        places |= {f"{where}.{name}": value for name, value in held.items()}
    telling = _Telling(asked, module)
    for place, value in places.items():
        telling.tell(place, value)
    return dict(sorted(telling.found.items(), key=lambda item: len(item[0])))  # a plan has one


class _Telling:
    """Tells of values what counts.

    Args:
        asked: The names that code of steps has.
        module: The trial's own, which is looked after elsewhere.
    """

    def __init__(self, asked: frozenset[str], module: nn.Module) -> None:
        own = (*module.modules(), *module.parameters(), *module.buffers())
        self.found: dict[str, str] = {}
        self._asked, self._by_name = asked, not asked.isdisjoint(_BY_NAME)
        self._above = {id(one) for one in own}  # and what is looked into at the moment
        self._form = functools.cache(_form)
        self._left = MOST

    def tell(self, place: str, value: Any) -> None:
        """Of a value and all within, each at a place of its own."""
        self._left = MOST
        self._look(place, value, self._is_asked(place.rpartition(".")[2]), 0)

    def _is_asked(self, name: str) -> bool:
        return self._by_name or name in self._asked

    def _look(self, place: str, value: Any, counts: bool, depth: int) -> None:
        with suppress(Exception):  # an object that lets nobody look
            self._tell(place, value, counts, depth)

    def _tell(self, place: str, value: Any, counts: bool, depth: int) -> None:
        if isinstance(value, contextvars.ContextVar):
            value = value.get(None)  # what code calls by the variable's name
        self._left -= 1
        if id(value) in self._above or self._left < 0:
            return
        kind: Any = type(value)
        form = self._form(kind)
        if form == "whole" or (form == "list" and _is_flat(value)):
            if counts and (words := _in_words(value)) is not None:
                self.found[place] = words
            return
        if depth > DEEPEST:
            return
        parts = dict(_visible(_attributes(value)) if form == "object" else _inside(value, form))
        asked = [name for name in parts if self._is_asked(name)] if form == "object" else []
        if asked or counts:
            self.found[place] = f"{_called(value)} {sorted(asked)}"
        self._above.add(id(value))
        try:
            for name, one in parts.items():
                is_asked = self._is_asked(name) or (counts and form != "object")
                self._look(f"{place}.{name}", one, is_asked, depth + 1)
        finally:
            self._above.remove(id(value))


def _form(kind: Any) -> str:
    """How values of a type are told of: at once (whole), or by what is in them."""
    if issubclass(kind, (*PLAIN, *_SAID, *_WHOLE)):
        return "whole"
    if issubclass(kind, (*_LISTS, set, frozenset)):
        return "list"
    if issubclass(kind, dict | types.MappingProxyType):
        return "dict"
    if issubclass(kind, (*_CODE, types.ModuleType)):
        return "code"
    if issubclass(kind, _HOLDERS) or kind.__module__.partition(".")[0] == "torch":
        return "held"
    is_users = issubclass(kind, (*SPACES, threading.local)) or not is_library(kind)
    has = has_attributes(kind) or issubclass(kind, threading.local)
    return "object" if is_users and has else "unknown"


def _is_flat(held: Any) -> bool:
    """Whether a list or set has numbers and texts alone, or is too long to look at each."""
    return len(held) > LONG or all(isinstance(one, PLAIN) for one in held)


def _in_words(value: Any) -> str | None:
    if isinstance(value, Tensor):
        return _numbers(value)
    if isinstance(value, np.ndarray):
        return _numbers(torch.from_numpy(value)) if value.dtype.kind in "biufc" else None
    if isinstance(value, nn.Module):
        return f"a module, {_digest(value)}"
    if isinstance(value, (*_LISTS, set, frozenset)):
        return _short(f"{len(value)}: {_some(value)!r}")
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, type | types.BuiltinFunctionType):
        return _called(value)
    return _short(repr(value))


def _called(value: Any) -> str:
    """The name of code, or of its type."""
    of = value if isinstance(value, _NAMED) else type(value)
    return f"{of.__module__}.{of.__qualname__}"


def _short(words: str) -> str:
    return words if len(words) <= WORDY else hashlib.sha256(words.encode()).hexdigest()


def _some(held: Any) -> list[Any]:
    """The numbers and texts in a list or set; of a long one some of them, or none."""
    if isinstance(held, set | frozenset):
        return sorted(map(repr, held)) if len(held) <= LONG else []
    some = list(itertools.islice(held, 0, None, len(held) // LONG + 1))
    return [one for one in some if isinstance(one, PLAIN)]


def _numbers(tensor: Tensor) -> str | None:
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return None
    some = tensor.detach().reshape(-1)[:: tensor.nbytes // SMALL + 1]
    return f"{list(tensor.shape)} {described(some)}"


def _digest(module: nn.Module) -> str:
    """Of its tensors, and of the plain attributes of all modules in it."""
    told = hashlib.sha256()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        told.update(f"{name}={_numbers(tensor)};".encode())
    for path, child in module.named_modules():
        hidden = hidden_of(child)
        for name, value in vars(child).items():
            if name not in hidden and (words := _in_words(value)) is not None:
                told.update(f"{path}.{name}={words};".encode())
    return told.hexdigest()[:16]


def _attributes(value: Any) -> Mapping[str, Any]:
    """Those of an object; of what is a thread's own, this one's."""
    is_threads = isinstance(value, threading.local)
    return parts_of_thread(value) if is_threads else attributes_of(value)


def _inside(value: Any, form: str) -> Iterator[tuple[str, Any]]:
    """What is in a container, what a function keeps, and what a library's object has."""
    if form == "list" and not isinstance(value, set | frozenset):
        yield from ((str(number), one) for number, one in enumerate(value))
    elif form == "dict":
        held = value if isinstance(value, dict) else dict(value)
        if len(held) <= LONG:
            items = [pair for pair in dict.items(held) if isinstance(pair[0], PLAIN)]
            yield from _visible({str(key): one for key, one in items})
        if has_attributes(type(value)):
            yield from _visible(attributes_of(value))
    elif form == "held" and has_attributes(type(value)):
        yield from _visible(attributes_of(value))
    elif isinstance(value, types.FunctionType) and not is_library(value):
        for name, one in function_parts(value, every_default=True).items():
            yield name.rstrip(" ="), one
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("named", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("func", value.__func__), ("self", value.__self__))


_CODE = (types.FunctionType, types.MethodType, functools.partial)


def _visible(held: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if len(held) <= LONG:
        yield from ((name, one) for name, one in held.items() if not name.startswith("__"))
