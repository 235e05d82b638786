"""What the user's own modules hold where a study is run, as bytes for a worker.

A worker imports them anew. What has been assigned in them since they were imported, or changed in
place (``config.WIDTH = 128``, ``cfg.merge_from_file(...)``), is not there then, nor is what they
drew at random. Alone a model's code finds all that.

Everything goes in one pickle, so that what is one object here is one there. A part that cannot go
(an open file, a lock) is ``KEPT``: a worker leaves there what it has. A part that is the main
file's is a number: it goes with the recipe, by value.
"""

from __future__ import annotations

import enum
import io
import pickle
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.pystate.sendable import (
    ATOMS,
    CODE,
    FLAT,
    NUMBERLESS,
    SIMPLE,
    home_of,
    is_flat,
    is_main_code,
    is_of_main,
    may_go,
)
from shoal.pystate.standins import Own, kept_by, reduced

LARGEST, ROOM, EACH = 2**20, 2**23, 100
"""Bytes of one value, and of all; what each container and object within counts beside them."""
ROOM_OF_MAIN = 2**24
"""Bytes of one object of the main file's."""
KEPT_ID = "kept"
_MANY = 100


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


def left_words(module: str, path: str, why: str) -> str:
    """That workers do not have a value, or where ``path`` is empty what a module holds at all."""
    what = f"what the module {module} holds" + f" as {path!r}" * bool(path)
    return f"{what} cannot be sent to workers, which have of it what its import makes: {why}"


def _once(size_of: Callable[[Any], int | None]) -> Callable[[Any], int | None]:
    """The same, asked once about each object: many modules may have it."""
    known: dict[int, tuple[Any, int | None]] = {}

    def size(value: Any) -> int | None:
        if id(value) not in known:
            known[id(value)] = (value, size_of(value))
        return known[id(value)][1]

    return size


def values_of(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """What may differ in a worker, by name; of classes that the module defines ``class.name``."""
    for name, value in list(vars(module).items()):
        if not _says_what_it_is(value):
            continue
        if isinstance(value, types.FunctionType) and home_of(value) == module.__name__:
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
            if home_of(function) == kind.__module__:
                yield from _own(f"{kind.__name__}.{key}", function)
        elif key.startswith("__") or isinstance(one, CODE):
            continue
        elif may_go(one) or is_of_main(one):
            yield f"{kind.__name__}.{key}", one


def _own(name: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if parts := kept_by(function):
        yield name, Own(function, parts)


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
        if kind in SIMPLE:
            return None
        self.num_objects += 1
        if kind in FLAT and len(value) >= _MANY and is_flat(value):
            return self._flat(value)
        if kind in ATOMS:
            return None
        if kind is Own:
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
        return reduced(value)


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
        if type(value) in SIMPLE and not isinstance(value, (str, bytes)):
            return 0
        if type(value) is Own:
            if all(type(one) in SIMPLE for one in value.parts.values()):
                return EACH
        elif not may_go(value) and not is_of_main(value):
            return None
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
