"""What an object keeps that reading it may change: its generators, and numbers that move.

A dataset's own ``random.Random`` is state that no index leads to, and so is a counter, or a
tensor that it writes to. A look finds those in attributes, in containers, closures and partial
functions, a few levels deep. What a C extension or another process keeps, nobody sees.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from zlib import crc32

import numpy as np
from torch import Tensor

from shoal.core.closures import closed_over
from shoal.data.streams import Stream, stream_of

DEEPEST = 10
MOST_OBJECTS = 2000
MOST_ITEMS = 64  # of one container
MOST_BYTES = 2**18  # of an array whose bytes are looked at
NUMBERS = (int, float)  # and no bool: "is it open yet" is no state
LEAVES = (str, bytes, int, float, complex, Tensor, np.ndarray, np.generic, type, ModuleType)


@dataclass(frozen=True, slots=True)
class Inside:
    """The generators and the numbers found in an object, by the path that leads there."""

    generators: dict[str, Stream] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)  # id of a generator -> its path
    numbers: dict[str, float] = field(default_factory=dict)


def look_inside(**roots: object) -> Inside:
    """All that is found in ``roots``, each object once, the nearest first."""
    found, seen = Inside(), set[int]()
    level = list(roots.items())
    for _ in range(DEEPEST):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            if _is_leaf(value) or id(value) in seen or len(seen) >= MOST_OBJECTS:
                continue
            seen.add(id(value))
            with contextlib.suppress(Exception):  # a proxy answers with errors of its own
                below += _look(path, value, found)
        level = below
    return found


def changed_number(before: Inside, after: Inside) -> str | None:
    """The path of the first number that differs or generator that is new, or None."""
    for path, value in after.numbers.items():
        if path in before.numbers and before.numbers[path] != value:
            return path
    return next((path for path in after.generators if path not in before.generators), None)


def _is_leaf(value: object) -> bool:
    return value is None or issubclass(type(value), LEAVES)


def _look(path: str, value: Any, found: Inside) -> list[tuple[str, Any]]:
    """Note a generator, or else an object's numbers; returns what to look at next."""
    stream = stream_of(value)
    if stream is not None:
        found.generators[path] = stream
        found.owners[id(value)] = path
        return []
    attributes = dict(getattr(value, "__dict__", {}))
    for name, item in (_class_numbers(value) | attributes).items():
        if type(item) in NUMBERS:
            found.numbers[f"{path}.{name}"] = item
    below = [(f"{path}.{name}", item) for name, item in attributes.items()]
    below += _contents(path, value)
    for name, item in below:
        if (mark := _mark(item)) is not None:
            found.numbers[name] = mark
    return below


def _mark(value: Any) -> float | None:
    """A number that moves when somebody writes to a tensor, or to an array that is not large."""
    if isinstance(value, Tensor) and not value.is_inference():
        return value._version
    if type(value) is np.ndarray and value.nbytes <= MOST_BYTES and not value.dtype.hasobject:
        return crc32(np.ascontiguousarray(value).data.cast("B")) if value.size else None
    return None


def _class_numbers(value: object) -> dict[str, float]:
    """Numbers that an object has from its class until it has its own."""
    found: dict[str, float] = {}
    for kind in reversed(type(value).__mro__):
        found |= {name: item for name, item in vars(kind).items() if type(item) in NUMBERS}
    return found


def _contents(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a short container or a function holds that is no attribute; long ones are data."""
    if type(value) is dict and len(value) <= MOST_ITEMS:
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif type(value) in (list, tuple) and len(value) <= MOST_ITEMS:
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args"))
        yield from ((f"{path}.{name}", item) for name, item in value.keywords.items())
    elif isinstance(value, MethodType | BuiltinFunctionType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, FunctionType):
        yield from ((f"{path}({name})", item) for name, item in closed_over(value).items())
