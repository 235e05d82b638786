"""What the user's own modules hold where a study is run, as bytes for a worker.

A worker imports them anew. What has been assigned in them since they were imported, or changed in
place (``config.WIDTH = 128``, ``cfg.merge_from_file(...)``), is not there then, nor is what they
drew at random. Alone a model's code finds all that.

Everything goes in one pickle, so that what is one object here is one there. A part that cannot go
(an open file, a lock, what a main file defines) is ``KEPT``: a worker leaves there what it has.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import functools
import io
import pathlib
import pickle
import re
import sys
import types
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.pystate.parts import SPACES, attributes_of, has_attributes
from shoal.pystate.values import STREAMS, Stream, filler_of, state_of
from shoal.source import MAINS
from shoal.spelled import is_library

LARGEST, ROOM = 2**20, 2**23
"""Bytes of one value, and of all."""
KEPT_ID = "kept"
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, tuple, frozenset))
"""Types whose values never change by themselves, and that a pickle has as they are."""
_IMMUTABLE: tuple[type, ...] = (
    *(pathlib.PurePath, re.Pattern, uuid.UUID, decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(range, slice, functools.partial, np.generic, np.dtype),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_CONTAINERS = (dict, list, set, collections.deque)
_REDUCED = frozenset(
    (
        *(collections.OrderedDict, collections.defaultdict, collections.deque),
        *(collections.Counter, types.SimpleNamespace),
    )
)
"""Types of the standard library that say how they are pickled, and have nothing else."""
_BASES = frozenset((object, *_CONTAINERS, tuple, frozenset, *_REDUCED))
_STORAGES = (torch.storage.TypedStorage, torch.storage.UntypedStorage)
_CODE = (types.FunctionType, types.BuiltinFunctionType, type)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class statement made it


class ModuleState:
    """What modules hold, and the objects in it, by the numbers that ``numbers`` has for them.

    Args:
        named: Values of other modules, by where they are.
    """

    def __init__(
        self,
        modules: Iterable[types.ModuleType],
        named: Iterable[tuple[types.ModuleType, str]] = (),
    ) -> None:
        room = ROOM
        values: dict[str, dict[str, Any]] = {}
        all_values = [(one, name, value) for one in modules for name, value in values_of(one)]
        all_values += [(one, name, vars(one)[name]) for one, name in named]
        for module, name, value in all_values:
            size = _size(value)
            if size is not None and size <= room:
                values.setdefault(module.__name__, {})[name] = value
                room -= size
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(values)
        met = list(pickler.met.values())
        pickler.dump(met)  # by the same memo: the objects themselves
        self.packed = file.getvalue()
        self.numbers = {id(value): number for number, value in enumerate(met)}
        self._held = met  # no other object comes to such an identity


def values_of(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """What may differ in a worker, by name; of classes that the module defines ``class.name``."""
    for name, value in list(vars(module).items()):
        if name.startswith("__") or isinstance(value, types.ModuleType):
            continue
        if isinstance(value, type) and value.__module__ == module.__name__:
            if value.__qualname__ == name and not issubclass(value, enum.Enum):
                yield from (
                    (f"{name}.{key}", one)
                    for key, one in list(vars(value).items())
                    if not key.startswith("__") and not isinstance(one, _CODE) and may_go(one)
                )
        elif not isinstance(value, types.FunctionType) or _home_of(value) != module.__name__:
            yield name, value


def may_go(value: Any) -> bool:
    """Whether a value, beside its parts, can be made again in another process."""
    kind: Any = type(value)
    if kind in ATOMS or kind in _CONTAINERS or isinstance(value, (*_IMMUTABLE, *_STORAGES)):
        return True
    if isinstance(value, STREAMS):
        return True
    if isinstance(value, _CODE):
        return _is_importable(value)
    if isinstance(value, Tensor):
        return kind in (Tensor, nn.Parameter)
    if isinstance(value, np.ndarray):
        return kind is np.ndarray and value.dtype != object
    if not _is_importable(kind):
        return False
    return isinstance(value, enum.Enum) or _is_transparent(kind)


@functools.cache
def _is_transparent(kind: type) -> bool:
    """Whether objects of a type are what they contain and their attributes, and nothing else.

    Of torch, NumPy and the standard library only containers and modules are: others have
    registries and the like behind them.
    """
    is_container = issubclass(kind, (*_CONTAINERS, tuple, frozenset))
    is_known = is_container or issubclass(kind, (*SPACES, nn.Module)) or not is_library(kind)
    if not is_known or not (is_container or has_attributes(kind)):
        return False
    made = [base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE]
    if not _BASES.issuperset(made):
        return False
    owners = (next(b for b in kind.__mro__ if name in vars(b)) for name in _REDUCING)
    return all(owner in _REDUCED or owner is object for owner in owners)


_REDUCING = ("__reduce__", "__reduce_ex__")


def _home_of(function: types.FunctionType) -> str:
    """The module whose code it is; a wrapper has its ``__module__`` from what it wraps."""
    return str(function.__globals__.get("__name__"))


def _is_importable(code: Any) -> bool:
    """Whether a worker finds a function or class by its name."""
    module, name = getattr(code, "__module__", None), getattr(code, "__qualname__", "")
    if not isinstance(module, str) or module in MAINS:
        return False
    if isinstance(code, types.FunctionType) and _home_of(code) != module:
        return False
    home: Any = sys.modules.get(module)
    if isinstance(code, types.BuiltinFunctionType) and getattr(home, code.__name__, None) is code:
        return True
    found = home
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is code


class _Pickler(pickle.Pickler):
    """Notes the objects that it meets which may change."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=4)
        self.met: dict[int, Any] = {}

    def persistent_id(self, value: Any) -> str | None:
        kind = type(value)
        if kind in ATOMS:
            return None
        if not may_go(value):
            return KEPT_ID
        if isinstance(value, Tensor | np.ndarray):
            _require_small(value)
        if not isinstance(value, (*_IMMUTABLE, *_STORAGES, *_CODE, enum.Enum)):
            self.met.setdefault(id(value), value)
        return None

    def reducer_override(self, value: Any) -> Any:
        """What an object contains and its attributes, without any of its class's code."""
        kind: Any = type(value)
        if isinstance(value, STREAMS):
            return Stream, (state_of(value),)
        if kind in _REDUCED or not _is_transparent(kind) or isinstance(value, enum.Enum):
            return NotImplemented
        base, items = base_of(kind), None
        if base in (tuple, frozenset):
            return new_fixed, (kind, list(base.__iter__(value)))
        if base is not object:
            items = (
                dict(dict.items(value)) if issubclass(base, dict) else list(base.__iter__(value))
            )
        attributes = dict(attributes_of(value)) if has_attributes(kind) else {}
        return new, (kind,), (items, attributes), None, None, fill


def base_of(kind: type) -> Any:
    """The type of containers that a class extends; ``object`` where it does not."""
    every = (*_REDUCED, *_CONTAINERS, tuple, frozenset, object)
    return next(base for base in every if base in kind.__mro__)


def new_fixed(kind: type, items: list[Any]) -> Any:
    """A tuple or frozenset of a class's own."""
    return base_of(kind).__new__(kind, items)


def new(kind: type) -> Any:
    """An object with nothing in it yet."""
    base = base_of(kind)
    return (object if base is types.SimpleNamespace else base).__new__(kind)


def fill(made: Any, state: tuple[Any, dict[str, Any]]) -> None:
    """The inverse of what a pickle has of such an object."""
    items, attributes = state
    if isinstance(made, Lost):
        return
    if isinstance(made, dict):
        refill_raw(made, items)
    elif items is not None and (filler := filler_of(made)) is not None:
        filler(made, items)
    parts = attributes_of(made)
    for name, value in attributes.items():
        parts[name] = value


def refill_raw(made: dict[Any, Any], items: dict[Any, Any]) -> None:
    """By a dictionary's own methods: a class may forbid changes in its."""
    base: Any = collections.OrderedDict if isinstance(made, collections.OrderedDict) else dict
    if list(made) != list(items):
        base.clear(made)
    for key, one in items.items():
        if key not in made or base.__getitem__(made, key) is not one:
            base.__setitem__(made, key, one)


class Lost:
    """In the place of what a worker cannot import; it leaves there what it has."""

    def __new__(cls, *given: Any, **named: Any) -> Lost:
        return super().__new__(cls)

    def __init__(self, *given: Any, **named: Any) -> None: ...


class _Full(Exception):
    """There is more than may go."""


def _require_small(value: Any) -> None:
    if isinstance(value, Tensor):
        is_here = value.device.type == "cpu" and value.layout is torch.strided
        if not is_here or value.grad_fn is not None:
            raise _Full
    if value.nbytes > LARGEST:
        raise _Full


class _Counted(io.RawIOBase):
    """Counts what is written, and keeps nothing of it."""

    size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.size += size
        if self.size > LARGEST:
            raise _Full
        return size


def _size(value: Any) -> int | None:
    """Of a value, in bytes; None where it cannot go, or is too large."""
    if type(value) in ATOMS and not isinstance(value, (tuple, frozenset, str, bytes)):
        return 0
    if not may_go(value):
        return None
    counted = _Counted()
    try:
        _Pickler(counted).dump(value)
    except Exception:  # whatever its code raises
        return None
    return counted.size
