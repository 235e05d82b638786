"""What a value holds, whatever its type is, in letters that two processes agree on."""

from __future__ import annotations

import copyreg
import functools
import hashlib
import pickle
import types
import weakref
import zlib
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.fusion.matching.signature import text_of
from shoal.pystate.fingerprints import Checked, of_numbers, of_simple
from shoal.pystate.parts import attributes_of, has_attributes
from shoal.pystate.sendable import is_flat

MOST_BYTES = 2**22
"""Of one value that are looked at; of a larger one as many from all over it."""
_MANY = 16
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)


class Digests:
    """Digests of values, while there is room for that: what comes first counts.

    ``left_out``: by identity what counts for nothing in them.
    """

    def __init__(self, left_out: Collection[int] = (), most: int = 30_000) -> None:
        self._left_out, self._left = left_out, most

    def of(self, value: Any) -> str:
        """Of an object as much as its type gives away."""
        for is_fast in (True, False):
            file = Checked()
            pickler = _Pickler(file, self._left_out, self._left)
            pickler.fast = is_fast
            try:
                pickler.dump(value)
            except (ValueError, RecursionError):  # it has itself in it: then each part once
                continue
            except Exception:  # no more room, whatever a type's code raises
                break
            break
        self._left = pickler.left
        return f"{file.crc:08x}"


@functools.lru_cache(maxsize=4096)
def of_code(code: types.CodeType) -> str:
    """What it does."""
    return hashlib.sha256(text_of(code).encode()).hexdigest()[:16]


class _Full(Exception):
    """So much is enough."""


class _Pickler(pickle.Pickler):
    """One whose bytes are equal of equal values, whichever of their parts are one object."""

    def __init__(self, file: Any, left_out: Collection[int], left: int) -> None:
        super().__init__(file, protocol=4)
        self.fast, self.left, self._left_out = True, left, left_out

    def persistent_id(self, value: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise _Full
        kind = type(value)
        if id(value) in self._left_out:
            return "left out"
        if kind in (str, bytes):
            return zlib.crc32(repr(value).encode()) if len(value) > MOST_BYTES else None
        if issubclass(kind, Tensor | np.ndarray):
            return self._numbers(value)
        if kind in (list, tuple, dict) and len(value) >= _MANY and is_flat(value):
            self.left -= len(value) // 50
            return len(value), of_simple(value).digest
        if issubclass(kind, _WEAK):
            return sorted(map(self._inner, value.items()))
        if issubclass(kind, set | frozenset):  # in another order in each process
            return sorted(map(self._inner, value))
        if issubclass(kind, types.FunctionType):
            return f"{value.__module__}.{value.__qualname__} {of_code(value.__code__)}"
        if issubclass(kind, types.GeneratorType) and value.gi_frame is not None:
            frame = value.gi_frame
            return value.__qualname__, frame.f_lasti, self._inner(dict(frame.f_locals))
        if issubclass(kind, type | types.ModuleType | types.BuiltinFunctionType):
            return f"{getattr(value, '__module__', '')}.{value.__name__}"
        return None

    def reducer_override(self, value: Any) -> Any:
        """What its type says of it; of one that says nothing its attributes."""
        try:
            known = copyreg.dispatch_table.get(type(value))
            return value.__reduce_ex__(4) if known is None else known(value)
        except Exception:  # a lock in it
            kind: Any = type(value)
            parts = dict(attributes_of(value)) if has_attributes(kind) else {}
            return str, (kind.__qualname__,), parts

    def _numbers(self, value: Tensor | np.ndarray[Any, Any]) -> Any:
        if isinstance(value, np.ndarray):
            is_plain = not value.dtype.hasobject
        else:
            is_plain = value.layout is torch.strided
        self.left -= 10 + (value.nbytes // 1000 if is_plain else 0)
        return of_numbers(value, MOST_BYTES)[:2] if is_plain else None

    def _inner(self, value: Any) -> int:
        file = Checked()
        inner = _Pickler(file, self._left_out, self.left)
        try:
            inner.dump(value)
        finally:
            self.left = inner.left
        return file.crc
