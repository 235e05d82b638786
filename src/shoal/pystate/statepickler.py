"""The pickle of what modules hold, and what each value takes in it.

Everything goes in one pickle, so that what is one object here is one there. A part that cannot go
(an open file, a lock) is ``KEPT``: a worker leaves there what it has. A part that is too large is
``LARGE``, a fingerprint: a worker is to have the same, or is told to have another (``COMPARED``).
One that the recipe refers to is ``WHOLE`` and goes all the same, as it would with the recipe. A
part that is the main file's is a number: it goes with the recipe, by value.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.pystate.fingerprints import Fingerprint, in_words
from shoal.pystate.sendable import (
    ATOMS,
    FLAT,
    NUMBERS,
    SIMPLE,
    has_number,
    is_flat,
    is_of_main,
    may_go,
    num_others,
)
from shoal.pystate.standins import ByType, Own, reduced

LARGEST, ROOM, EACH = 2**20, 2**23, 100
"""Bytes of one value, and of all; what each container and object within counts beside them."""
ROOM_OF_MAIN = 2**24
"""Bytes of one object of the main file's."""
KEPT, FLAT_ID, LARGE, WHOLE = "kept", "flat", "large", "whole"
COMPARED, NAMED = "compared", "named"
"""What a pickle has in the place of values; but for the first with what belongs to it."""
Place = str | int | tuple[Any, ...]
_MANY = 100


class Asked(NamedTuple):
    """What a pickler asks of values; see ``ModuleState``.

    ``by_type``: what of one goes that only its type can take apart, or its place (``bytype.py``).
    """

    size_by_value: Callable[[Any], int | None]
    fingerprint: Callable[[Any], Fingerprint]
    by_type: Callable[[Any], ByType | str] = lambda value: KEPT
    whole: Collection[int] = ()


class Compared(NamedTuple):
    """In the place of what is not sent; where a worker has another one, that is told."""

    value: Any


class TooLarge(NamedTuple):
    """A value that is not sent."""

    value: Any


class StatePickler(pickle.Pickler):
    """Notes the objects that it meets which may change, and those that are the main file's."""

    def __init__(self, file: Any, asked: Asked) -> None:
        super().__init__(file, protocol=4)
        self.met: dict[int, Any] = {}
        self.large: dict[int, Any] = {}
        self.of_main: dict[int, tuple[int, Any]] = {}  # with their numbers
        self.whole: dict[int, tuple[int, Any]] = {}
        self.num_objects = 0
        self._flat: dict[int, int] = {}
        self._by_type: dict[int, ByType] = {}
        self._asked = asked

    def persistent_id(self, value: Any) -> Place | None:
        kind: Any = type(value)
        if kind in SIMPLE and not (kind in (str, bytes) and len(value) > LARGEST):
            return None
        if kind in (TooLarge, Compared):
            place = LARGE if kind is TooLarge else COMPARED
            return place, *self._asked.fingerprint(value.value)
        self.num_objects += 1
        if kind in FLAT and len(value) >= _MANY and is_flat(value):
            return self._place_of_flat(value)
        if kind in _SIZED and self._has_too_many(value):
            return LARGE, *self._asked.fingerprint(value)
        if kind in (str, bytes):
            return self._place_of_large(value)
        if kind in ATOMS or kind is Own:
            return None
        if is_of_main(value):
            return self._place_of_mains(value)
        if not may_go(value) or (kind in NUMBERS and not _has_bytes(value)):
            return self._place_by_type(value)
        if kind in NUMBERS and _is_large(value):
            return self._place_of_large(value)
        if has_number(kind):
            self.met.setdefault(id(value), value)
        return None

    def _place_by_type(self, value: Any) -> Place | None:
        found = self._asked.by_type(value)
        if found == LARGE:
            return self._place_of_large(value)
        if found == COMPARED:
            return self.persistent_id(Compared(value))
        if found == KEPT:
            return KEPT
        if isinstance(found, ByType):
            self.met.setdefault(id(value), value)
            self._by_type[id(value)] = found
        return None

    def _has_too_many(self, value: Any) -> bool:
        return len(value) * EACH > LARGEST and num_others(value) * EACH > LARGEST

    def _place_of_flat(self, value: Any) -> Place:
        """As a whole: to be asked about each of many numbers and texts takes long."""
        if (known := self._flat.get(id(value))) is not None:
            return FLAT_ID, known, b""
        packed = pickle.dumps(value, protocol=4) if len(value) <= LARGEST else b""
        if not packed or len(packed) > LARGEST:
            return self._place_of_large(value)
        self.met.setdefault(id(value), value)
        number = self._flat[id(value)] = len(self._flat)
        return FLAT_ID, number, packed

    def _place_of_large(self, value: Any) -> Place:
        if id(value) not in self._asked.whole:
            self.large[id(value)] = value
            return LARGE, *self._asked.fingerprint(value)
        self.met.setdefault(id(value), value)
        return WHOLE, self.whole.setdefault(id(value), (len(self.whole), value))[0]

    def _place_of_mains(self, value: Any) -> Place:
        size = self._asked.size_by_value(value)
        if size is None:
            return KEPT
        if size > ROOM_OF_MAIN:
            return LARGE, *Fingerprint(in_words(value), None)
        return self.of_main.setdefault(id(value), (len(self.of_main), value))[0]

    def reducer_override(self, value: Any) -> Any:
        found = self._by_type.get(id(value))
        return reduced(value if found is None else found)


_SIZED = (dict, list, set, tuple, frozenset, collections.deque)


class Full(Exception):
    """There is more than may go."""


def _has_bytes(value: Tensor | np.ndarray[Any, Any]) -> bool:
    if isinstance(value, np.ndarray):
        return True
    return value.layout is torch.strided and value.device.type in ("cpu", "cuda")


def _is_large(value: Tensor | np.ndarray[Any, Any]) -> bool:
    """Whether it is too large; those of a GPU are none that another process may have."""
    if isinstance(value, np.ndarray):
        return value.nbytes > LARGEST
    storage = value.untyped_storage().nbytes()  # all of it goes
    return max(storage, value.nbytes) > LARGEST or value.device.type != "cpu"


class Counted(io.RawIOBase):
    """Counts what is written, and keeps nothing of it."""

    size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.size += size
        if self.size > LARGEST:
            raise Full
        return size


class Sizes:
    """Of values, in bytes, what they have in common with those before not counted again."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._begin()

    def _begin(self) -> None:
        self._counted = Counted()
        self._pickler = Counting(self._counted, self._asked)

    def of(self, value: Any) -> int | None:
        """None where it cannot go at all; more than there is room for where it does not."""
        if type(value) is Compared or (type(value) in SIMPLE and type(value) not in (str, bytes)):
            return 0
        if type(value) is Own:
            if all(type(one) in SIMPLE for one in value.parts.values()):
                return EACH
        elif not (may_go(value) or is_of_main(value)) and self._asked.by_type(value) == KEPT:
            return None
        self._counted.size = self._pickler.num_objects = 0
        try:
            self._pickler.dump(value)
        except Exception:  # it is full, or whatever its code raises
            self._begin()  # it has met what it has not come to the end of
            return ROOM + 1
        return self._counted.size


class Counting(StatePickler):
    """One that is told to stop where there is too much of small things, too."""

    def persistent_id(self, value: Any) -> Place | None:
        if self.num_objects * EACH > LARGEST:
            raise Full
        return super().persistent_id(value)
