"""What the user's own modules hold where a study is run, as bytes for a worker.

A worker imports them anew. What has been assigned in them since they were imported, or changed in
place (``config.WIDTH = 128``, ``cfg.merge_from_file(...)``), is not there then, nor is what they
drew at random. Alone a model's code finds all that.

Everything goes in one pickle, so that what is one object here is one there. A part that cannot go
(an open file, a lock) is ``KEPT``: a worker leaves there what it has. A part that is the main
file's is a number: it goes with the recipe, by value.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import io
import pathlib
import pickle
import re
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.pystate.parts import SPACES, attributes_of, function_parts, has_attributes
from shoal.pystate.values import STREAMS, filler_of, state_of
from shoal.source import MAINS
from shoal.spelled import is_library

LARGEST, ROOM, EACH = 2**20, 2**23, 100
"""Bytes of one value, and of all; what each container and object within counts beside them."""
ROOM_OF_MAIN = 2**24
"""Bytes of one object of the main file's."""
KEPT_ID = "kept"
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, tuple, frozenset))
"""Types whose values never change by themselves, and that a pickle has as they are."""
_IMMUTABLE: tuple[type, ...] = (
    *(pathlib.PurePath, re.Pattern, uuid.UUID, decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(range, slice, np.generic, np.dtype),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_CONTAINERS = (dict, list, set, collections.deque)
FIXED = (tuple, frozenset, int, float, complex, str, bytes)
"""What a class may extend whose objects get what they contain as they are made."""
_REDUCED = frozenset(
    (
        *(collections.OrderedDict, collections.defaultdict, collections.deque),
        *(collections.Counter, types.SimpleNamespace),
    )
)
"""Types of the standard library that say how they are pickled, and have nothing else."""
_BASES = frozenset((object, *_CONTAINERS, *FIXED, *_REDUCED))
_STORAGES = (torch.storage.TypedStorage, torch.storage.UntypedStorage)
_REDUCED_ALONE = _REDUCED - {collections.defaultdict}  # its function may be one that is KEPT
_CODE = (types.FunctionType, types.BuiltinFunctionType, type)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


_MADE_OF: dict[type, Callable[[Any], dict[str, Any]]] = {
    functools.partial: lambda one: {"func": one.func, "args": one.args, "named": one.keywords},
    types.MethodType: lambda one: {"func": one.__func__, "self": one.__self__},
    types.MappingProxyType: lambda one: {"keys": tuple(one.keys()), "values": tuple(one.values())},
}
"""Types whose objects are made of parts for good, and how they show them."""
_MAKE: dict[type, Callable[..., Any]] = {
    functools.partial: lambda func, args, named: functools.partial(func, *args, **named),
    types.MethodType: lambda func, self: types.MethodType(func, self),
    types.MappingProxyType: lambda keys, values: types.MappingProxyType(
        dict(zip(keys, values, strict=True))
    ),
}


class ModuleState:
    """What modules hold, and the objects in it, by the numbers that ``numbers`` has for them.

    Args:
        size_by_value: How many bytes an object of the main file's is; None: it cannot go.
        named: Values of other modules, by where they are.

    Attributes:
        homes: By number, the module in which an object was met first.
        of_main: What is to go with it, in the order of its numbers.
    """

    def __init__(
        self,
        modules: Iterable[types.ModuleType],
        size_by_value: Callable[[Any], int | None] = lambda value: None,
        named: Iterable[tuple[types.ModuleType, str]] = (),
    ) -> None:
        wanted = {module: list(values_of(module)) for module in modules}
        for module, name in named:
            wanted.setdefault(module, []).append((name, vars(module)[name]))
        size_by_value = _once(size_by_value)
        size_of = _once(_Sizes(size_by_value).of)
        room, values, counted = ROOM, {}, set()
        for module, pairs in wanted.items():
            held = {}
            for name, value in pairs:
                size = size_of(value)
                if size is not None and (size <= room or id(value) in counted):
                    held[name], room = value, room - (0 if id(value) in counted else size)
                    counted.add(id(value))
            if held:
                values[module.__name__] = held
        file, homes = io.BytesIO(), list[str]()
        pickler = _Pickler(file, size_by_value)
        pickler.dump(list(values))
        for name, held in values.items():
            pickler.dump(held)  # by the memo of those before: one object stays one
            homes += [name] * (len(pickler.met) - len(homes))
        met = list(pickler.met.values())
        pickler.dump(met)  # the objects themselves
        self.packed = file.getvalue()
        self.numbers = {id(value): number for number, value in enumerate(met)}
        self.homes, self.of_main = homes, list(pickler.of_main.values())
        self._held = met  # no other object comes to such an identity


def _once(size_of: Callable[[Any], int | None]) -> Callable[[Any], int | None]:
    """The same, asked once about each object: many modules may have it."""
    known: dict[int, tuple[Any, int | None]] = {}

    def size(value: Any) -> int | None:
        if id(value) not in known:
            known[id(value)] = (value, size_of(value))
        return known[id(value)][1]

    return size


class Own:
    """A function at the place where it is defined: what it keeps goes, not its name."""

    def __init__(self, function: types.FunctionType, parts: dict[str, Any]) -> None:
        self.function, self.parts = function, parts


def values_of(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """What may differ in a worker, by name; of classes that the module defines ``class.name``."""
    for name, value in list(vars(module).items()):
        if not _says_what_it_is(value):
            continue
        if isinstance(value, types.FunctionType) and _home_of(value) == module.__name__:
            yield from _own(name, value)
        elif name.startswith("__") or isinstance(value, types.ModuleType) or is_main_code(value):
            continue
        elif isinstance(value, type) and value.__module__ == module.__name__:
            if value.__qualname__ == name and not issubclass(value, enum.Enum):
                yield from _values_of_class(value)
        else:
            yield name, value


def _says_what_it_is(value: Any) -> bool:
    """Whether it can be asked: one that stands for another may raise where there is none."""
    try:
        return isinstance(value.__class__, type)
    except Exception:  # whatever its code raises
        return False


def _values_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    for key, one in list(vars(kind).items()):
        if not _says_what_it_is(one):
            continue
        function = one.__func__ if isinstance(one, staticmethod | classmethod) else one
        if isinstance(function, types.FunctionType):
            if _home_of(function) == kind.__module__:
                yield from _own(f"{kind.__name__}.{key}", function)
        elif key.startswith("__") or isinstance(one, _CODE):
            continue
        elif may_go(one) or is_of_main(one):
            yield f"{kind.__name__}.{key}", one


def _own(name: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if parts := _kept_by(function):
        yield name, Own(function, parts)


def _kept_by(function: types.FunctionType) -> dict[str, Any]:
    parts = dict(function_parts(function, every_default=True))
    parts.pop(_CLASS_CELL, None)
    return parts


_CLASS_CELL = "__class__ "  # of methods with super()


def is_of_main(value: Any) -> bool:
    """Whether it is what the main file defines, or an object of such a class."""
    return is_main_code(value) or type(value).__module__ in MAINS


def is_main_code(value: Any) -> bool:
    """Whether it is a function or class that the main file defines."""
    if isinstance(value, types.FunctionType):
        return _home_of(value) in MAINS
    return isinstance(value, type) and value.__module__ in MAINS


def may_go(value: Any) -> bool:
    """Whether a value, beside its parts, can be made again in another process."""
    kind: Any = type(value)
    if kind is dict:
        return not _is_of_process(value)
    if kind in ATOMS or kind in _CONTAINERS or kind in _MADE_OF or kind is Own:
        return True
    if isinstance(value, types.ModuleType):
        return value.__name__ not in MAINS and sys.modules.get(value.__name__) is value
    if isinstance(value, (*_IMMUTABLE, *_STORAGES)) and is_library(kind):
        return True
    if isinstance(value, (*STREAMS, types.FunctionType)):
        return True
    if isinstance(value, _CODE):
        return _is_importable(value)
    if isinstance(value, Tensor):
        return kind in (Tensor, nn.Parameter) and value.grad_fn is None
    if isinstance(value, np.ndarray):
        return kind is np.ndarray and value.dtype != object
    if not _is_importable(kind):
        return False
    return isinstance(value, enum.Enum) or _is_transparent(kind)


def _is_of_process(value: dict[Any, Any]) -> bool:
    """Whether it is ``sys.modules``, or what ``globals()`` gives."""
    if value is sys.modules:
        return True
    name = value.get("__name__") if "__spec__" in value else None
    home = sys.modules.get(name) if type(name) is str else None
    return home is not None and vars(home) is value


@functools.cache
def _is_transparent(kind: type) -> bool:
    """Whether objects of a type are what they contain and their attributes, and nothing else.

    Of torch, NumPy and the standard library only containers and modules are: others have
    registries and the like behind them.
    """
    is_container = issubclass(kind, (*_CONTAINERS, *FIXED))
    is_known = is_container or issubclass(kind, (*SPACES, nn.Module)) or not is_library(kind)
    if not is_known or not (is_container or has_attributes(kind)):
        return False
    if not all(base in _BASES or _is_by_statement(base) for base in kind.__mro__):
        return False
    owners = (next(b for b in kind.__mro__ if name in vars(b)) for name in _REDUCING)
    return all(owner in _REDUCED or owner is object for owner in owners)


NUMBERLESS = (*_IMMUTABLE, *_STORAGES, *_CODE, *_MADE_OF, enum.Enum, types.ModuleType, Own)
"""Of objects that never change by themselves; nobody fills them."""


def _is_by_statement(kind: type) -> bool:
    """Whether a class statement made it, and not C, which says itself what is in its objects."""
    is_of_c = isinstance(vars(kind).get("__new__"), types.BuiltinFunctionType)
    return bool(kind.__flags__ & _HEAP_TYPE) and not is_of_c


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


_SIMPLE = ATOMS - {tuple, frozenset}
_FLAT = (dict, list, set)
_MANY = 100


def is_flat(value: Any) -> bool:
    """Whether a container has numbers and texts alone."""
    has_values = isinstance(value, dict)
    kinds = {*map(type, value), *(map(type, dict.values(value)) if has_values else ())}
    return _SIMPLE.issuperset(kinds)


class _Pickler(pickle.Pickler):
    """Notes the objects that it meets which may change, and those that are the main file's."""

    def __init__(self, file: Any, size_by_value: Callable[[Any], int | None]) -> None:
        super().__init__(file, protocol=4)
        self.met: dict[int, Any] = {}
        self.of_main: dict[int, Any] = {}
        self.flat: dict[int, tuple[int, bytes]] = {}
        self.num_objects = 0
        self._size_by_value = size_by_value

    def persistent_id(self, value: Any) -> str | int | tuple[int, bytes] | None:
        kind = type(value)
        if kind in _SIMPLE:
            return None
        self.num_objects += 1
        if kind in _FLAT and len(value) >= _MANY and is_flat(value):
            return self._flat(value)
        if kind in ATOMS:
            return None
        if is_of_main(value):
            return self._number_of(value)
        if not may_go(value):
            return KEPT_ID
        if isinstance(value, Tensor | np.ndarray):
            _require_small(value)
        if not isinstance(value, NUMBERLESS):
            self.met.setdefault(id(value), value)
        return None

    def _flat(self, value: Any) -> tuple[int, bytes]:
        """As a whole: to be asked about each of many numbers and texts takes long."""
        if len(value) > LARGEST:
            raise _Full
        if (packed := self.flat.get(id(value))) is None:
            packed = self.flat[id(value)] = len(self.flat), pickle.dumps(value, protocol=4)
            self.met.setdefault(id(value), value)
            return packed
        return packed[0], b""

    def _number_of(self, value: Any) -> str | int:
        size = self._size_by_value(value)
        if size is None:
            return KEPT_ID
        if size > ROOM_OF_MAIN:
            raise _Full
        self.of_main.setdefault(id(value), value)
        return list(self.of_main).index(id(value))

    def reducer_override(self, value: Any) -> Any:
        """What an object contains and its attributes, without any of its class's code."""
        kind: Any = type(value)
        if kind is Own:
            return Code, (place_of(value.function),), {"parts": value.parts}
        if isinstance(value, types.ModuleType):
            return _module, (value.__name__,)
        if isinstance(value, types.BuiltinFunctionType):  # its maker may have another way
            module, name = str(value.__module__), str(value.__name__)
            is_there = getattr(sys.modules.get(module), name, None) is value
            return (_function, (module, name)) if is_there else NotImplemented
        if kind is types.FunctionType and not _is_importable(value):
            return Code, (place_of(value),), {"parts": _kept_by(value)}
        if isinstance(value, STREAMS):
            is_here = isinstance(value, torch.Generator) and value.device.type != "cpu"
            return Stream, (None if is_here or not is_library(kind) else kind, state_of(value))
        if kind in _MADE_OF:
            return Made, (kind.__name__,), {"parts": dict(_MADE_OF[kind](value))}
        if isinstance(value, enum.Enum):
            is_named = value.name in kind.__members__
            return (_member, (kind, value.name)) if is_named else NotImplemented
        if kind in _REDUCED_ALONE or kind in FIXED or not _is_transparent(kind):
            return NotImplemented
        return _reduce_object(value)


def _reduce_object(value: Any) -> tuple[Any, ...]:
    kind: Any = type(value)
    base, items = base_of(kind), None
    attributes = dict(attributes_of(value)) if has_attributes(kind) else {}
    if base in FIXED:
        known = _plain(base, value)
        return new_fixed, (kind, known), (None, attributes), None, None, fill
    if base is not object:
        items = dict(dict.items(value)) if issubclass(base, dict) else list(base.__iter__(value))
    return new, (kind,), (items, attributes), None, None, fill


def _plain(base: Any, value: Any) -> Any:
    """As one of the type that its class extends."""
    if base in (tuple, frozenset):
        return list(base.__iter__(value))
    return _PLAIN[base](value)


_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
}


def base_of(kind: type) -> Any:
    """The type of containers that a class extends; ``object`` where it does not."""
    every = (*_REDUCED, *_CONTAINERS, *FIXED, object)
    return next(base for base in every if base in kind.__mro__)


def new_fixed(kind: type, items: Any) -> Any:
    """A tuple, frozenset, number or text of a class's own."""
    if issubclass(kind, Lost):
        return kind()
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
    if list(base.__iter__(made)) != list(items):
        base.clear(made)
    for key, one in items.items():
        if not base.__contains__(made, key) or base.__getitem__(made, key) is not one:
            base.__setitem__(made, key, one)


class Lost:
    """In the place of what a worker cannot import; it leaves there what it has."""

    def __new__(cls, *given: Any, **named: Any) -> Lost:
        return super().__new__(cls)

    def __init__(self, *given: Any, **named: Any) -> None: ...


def _module(name: str) -> Any:
    """A module that a worker imports as well, if it can."""
    try:
        return importlib.import_module(name)
    except Exception:  # whatever its own code raises
        return Lost()


def _function(module: str, name: str) -> Any:
    return getattr(_module(module), name, Lost())


def _member(kind: Any, name: str) -> Any:
    """Of an enumeration, whatever the member's value is."""
    return Lost() if issubclass(kind, Lost) or name not in kind.__members__ else kind[name]


class Stream:
    """Where a random generator stood."""

    def __init__(self, kind: Any, state: Any) -> None:
        self.kind, self.state = kind, state

    def made(self) -> Any:
        """Another one, which stands nowhere yet; None where only one that is there will do."""
        if self.kind is np.random.Generator:
            return self.kind(getattr(np.random, self.state["bit_generator"])())
        return None if self.kind is None else self.kind()


class Made:
    """What is made of parts for good; ``kind`` names its type, which no module may have."""

    parts: dict[str, Any]

    def __init__(self, kind: str) -> None:
        self.kind = next(one for one in _MADE_OF if one.__name__ == kind)

    def parts_of(self, here: Any) -> dict[str, Any]:
        """Those of an object of this process, if it is such a one."""
        return _MADE_OF[self.kind](here) if type(here) is self.kind else {}

    def made(self, parts: dict[str, Any]) -> Any:
        """One of these parts."""
        return _MAKE[self.kind](**parts)


class Code:
    """What a function keeps whose code a worker has."""

    parts: dict[str, Any]

    def __init__(self, place: tuple[str, str, int]) -> None:
        self.place = place

    def is_that_of(self, here: Any) -> bool:
        """Whether a function of this process has this code."""
        return type(here) is types.FunctionType and place_of(here) == self.place


def place_of(function: types.FunctionType) -> tuple[str, str, int]:
    """Where its code stands."""
    code = function.__code__
    return _home_of(function), code.co_qualname, code.co_firstlineno


class _Full(Exception):
    """There is more than may go."""


def _require_small(value: Any) -> None:
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided:
            raise _Full
        if value.untyped_storage().nbytes() > LARGEST:  # all of it goes
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


class _Sizes:
    """Of values, in bytes, what they have in common with those before not counted again."""

    def __init__(self, size_by_value: Callable[[Any], int | None]) -> None:
        self._size_by_value = size_by_value
        self._begin()

    def _begin(self) -> None:
        self._counted = _Counted()
        self._pickler = _Counting(self._counted, self._size_by_value)

    def of(self, value: Any) -> int | None:
        """None where it cannot go, or is too large."""
        if type(value) in _SIMPLE and not isinstance(value, (str, bytes)):
            return 0
        if not may_go(value) and not is_of_main(value):
            return None
        if type(value) is Own and all(type(one) in _SIMPLE for one in value.parts.values()):
            return EACH
        self._counted.size = self._pickler.num_objects = 0
        try:
            self._pickler.dump(value)
        except Exception:  # whatever its code raises
            self._begin()  # it has met what it has not come to the end of
            return None
        return self._counted.size


class _Counting(_Pickler):
    """One that is told to stop where there is too much of small things, too."""

    def persistent_id(self, value: Any) -> str | int | tuple[int, bytes] | None:
        if self.num_objects * EACH > LARGEST:
            raise _Full
        return super().persistent_id(value)
