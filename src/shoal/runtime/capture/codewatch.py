"""Whether the Python code of a pass may do something else than it did: what it reads is watched.

A pass that is run again without its code does what the code did then. So the code's own numbers
and objects are looked at before each: the attributes of the model's modules, and what the
recipe's functions keep in closures, defaults, globals, and in the objects that they are methods
of. Values are compared by identity first; numbers and words also by what they are.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Iterator, Mapping
from operator import is_not
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.closures import contents_of
from shoal.core.codes import names_in
from shoal.fusion.likeness import Snapshot
from shoal.fusion.rows.blend import HIDDEN

DEEPEST = 4  # functions and objects within others that are looked into
LONGEST = 128  # items of a list that are looked at, the first ones
MOST = 500  # values that are looked at before each pass
PLAIN = (types.ModuleType, type, types.BuiltinFunctionType)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
NUMBERS = (bool, int, float, complex, str, bytes, type(None))


class _Spot(NamedTuple):
    """Where a function finds a value, and the value that is known."""

    store: Mapping[Any, Any] | types.CellType
    key: Any
    value: Any
    words: str

    def holds(self) -> bool:
        """Whether it is there still."""
        if isinstance(self.store, types.CellType):
            (found,) = contents_of([self.store])
        else:
            found = self.store.get(self.key, self)
        known = self.value
        if found is known:
            return True
        return type(found) is type(known) and isinstance(known, int | float | str | bytes) and (
            repr(found) == repr(known)
        )  # fmt: skip


class CodeWatch:
    """What a model's code and functions beside it read, as it was when this was made.

    Attributes:
        too_much: In words, what reads more than can be looked at before each pass; mostly empty.
    """

    def __init__(self, model: nn.Module, functions: Mapping[str, Callable[..., Any] | None]):
        self._model = Snapshot(model)
        self._spots: list[_Spot] = []
        self._lists: list[tuple[Any, list[Any], str]] = []
        self._beside: list[Snapshot] = []
        self._seen: set[int] = set()
        self._tensors: set[int] = {id(t) for m in model.modules() for t in _tensors(vars(m))}
        self.too_much = ""
        self.draws = ""
        self._versions: list[tuple[Tensor, int, str]] = []
        self._own = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._seen |= {id(m) for m in model.modules()}
        self._look_at_classes(model)
        for path, child in model.named_modules():
            for key, value in vars(child).items():
                if key not in HIDDEN and not key.endswith("_hooks"):
                    self._look(value, f"the attribute {f'{path}.{key}' if path else key!r}", 0)
        for name, function in functions.items():
            self._look(function, f"the recipe's {name}", 0)

    @property
    def tensors(self) -> frozenset[int]:
        """The ids of tensors that are found there, and stay."""
        return frozenset(self._tensors)

    def change(self) -> str:
        """The first thing that is another now, in words; empty if nothing is."""
        if words := self._model.change():
            return words
        for spot in self._spots:
            if not spot.holds():
                return spot.words
        for tensor, version, words in self._versions:
            if tensor._version != version:
                return words
        for container, before, words in self._lists:
            now = _items(container)[:LONGEST]
            if len(now) != len(before) or any(map(is_not, now, before)):
                return words
        return next((words for one in self._beside if (words := one.change())), "")

    def _look(self, value: Any, words: str, depth: int) -> None:
        if id(value) in self._seen or depth > DEEPEST or isinstance(value, NUMBERS):
            return
        if len(self._spots) > MOST:
            self.too_much = words
            return
        self._seen.add(id(value))
        if isinstance(value, GENERATORS):
            self.draws = words
        elif isinstance(value, Tensor):
            self._tensors.add(id(value))
            if id(value) not in self._own:
                self._versions.append((value, value._version, words))
        elif isinstance(value, nn.Module):
            self._look_beside(value)
        elif isinstance(value, list | tuple | dict | set | frozenset):
            inside = _items(value)[:LONGEST]
            self._lists.append((value, inside, words))
            for item in inside:
                self._look(item, words, depth + 1)
        elif not isinstance(value, PLAIN) and not type(value).__module__.startswith("torch"):
            for spot in _spots(value, words):
                self._spots.append(spot)
                self._look(spot.value, spot.words, depth + 1)

    def _look_beside(self, module: nn.Module) -> None:
        """A module that is no part of the model, such as a loss."""
        self._beside.append(Snapshot(module))
        self._tensors |= {id(t) for m in module.modules() for t in _tensors(vars(m))}
        self._tensors |= {id(t) for t in (*module.parameters(), *module.buffers())}

    def _look_at_classes(self, model: nn.Module) -> None:
        """The numbers that methods of the model's classes find in their modules' globals."""
        for kind in {type(m) for m in model.modules()}:
            if kind.__module__.startswith("torch."):
                continue
            for spot in _spots_of_class(kind, f"the code of {kind.__name__}"):
                if isinstance(spot.value, (*NUMBERS, list, dict, set)):
                    self._spots.append(spot)
                    if not isinstance(spot.value, NUMBERS):
                        items = _items(spot.value)[:LONGEST]
                        self._lists.append((spot.value, items, spot.words))


def _spots(value: Any, words: str) -> Iterator[_Spot]:
    """Where a function, or a method's object, keeps what it reads."""
    if isinstance(value, functools.partial):
        yield _Spot({0: value.func}, 0, value.func, words)
        yield from (_Spot(value.keywords, k, v, words) for k, v in value.keywords.items())
        yield from (_Spot({0: item}, 0, item, words) for item in value.args)
    elif isinstance(value, types.MethodType):
        yield _Spot({0: value.__func__}, 0, value.__func__, words)
        yield _Spot({0: value.__self__}, 0, value.__self__, words)
    elif isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        named = zip(value.__code__.co_freevars, cells, contents_of(cells), strict=True)
        for name, cell, item in named:
            yield _Spot(cell, None, item, f"{name!r} of {words}")
        for name in names_in(value.__code__):
            if name in value.__globals__:
                found = value.__globals__[name]
                if not isinstance(found, PLAIN):
                    yield _Spot(value.__globals__, name, found, f"{name!r} of {words}")
        for item in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            yield _Spot({0: item}, 0, item, words)
    elif hasattr(value, "__dict__"):
        own = vars(value)
        yield from (_Spot(own, key, item, f"{key!r} of {words}") for key, item in own.items())
        yield from _spots_of_slots(value, words)
        yield from _spots_of_class(type(value), words)
    elif hasattr(type(value), "__slots__"):
        yield from _spots_of_slots(value, words)
        yield from _spots_of_class(type(value), words)


def _spots_of_slots(value: Any, words: str) -> Iterator[_Spot]:
    """What an object keeps in slots."""
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                yield _Spot(_Slots(value), name, getattr(value, name), f"{name!r} of {words}")


class _Slots(dict[str, Any]):
    """Slots, looked up as a mapping is."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, key: str, default: Any = None) -> Any:
        """What stands there now."""
        return getattr(self._value, key, default)


def _spots_of_class(kind: type, words: str) -> Iterator[_Spot]:
    """What the functions of a class find in closures and globals."""
    for value in list(vars(kind).values()):
        if isinstance(value, types.FunctionType):
            yield from _spots(value, words)


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container, *container.values()]
    return list(container)


def _tensors(attributes: Mapping[str, Any]) -> Iterator[Tensor]:
    """Those among attributes, and in lists of them."""
    for value in attributes.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, Tensor))
