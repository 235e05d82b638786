"""What has got somewhere, and cannot be led back: iterators and generator functions' generators.

A count says where it is and can be made anew. Of others there is only a mark of how far they got,
by which is seen, and told, that code goes on with them.
"""

from __future__ import annotations

import ast
import io
import itertools
import operator
import types
import warnings
from collections.abc import Iterator
from typing import Any

DEEPEST = 4  # iterators within iterators that are looked at
_PLAIN = (bool, int, float, str, type(None))


def is_iterator(value: Any) -> bool:
    """Whether it is gone through once: no open file, whose place is nobody's state."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def count_at(count: itertools.count[Any]) -> tuple[Any, Any]:
    """The next number of a count, and its step.

    Raises:
        ValueError, SyntaxError: they are no numbers of Python's own.
    """
    numbers = ast.literal_eval(repr(count).removeprefix("count"))
    return numbers if isinstance(numbers, tuple) else (numbers, 1)


def mark_of(iterator: Any, depth: int = 0) -> Any:
    """Another one when it has gone on, as far as can be seen; None of what shows nothing."""
    if isinstance(iterator, types.GeneratorType):
        return _of_generator(iterator)
    if (taken := getattr(iterator, "_num_yielded", None)) is not None:  # of a DataLoader
        return int(taken)
    if hasattr(iterator, "__length_hint__"):
        return operator.length_hint(iterator)
    if depth > DEEPEST or not hasattr(type(iterator), "__reduce__"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of itertools lose it in Python 3.14
            _, *parts = iterator.__reduce__()
    except TypeError:
        return None
    return [_of_part(part, depth + 1) for part in parts]


def _of_part(part: Any, depth: int) -> Any:
    if isinstance(part, tuple | list) and depth <= DEEPEST:
        return [_of_part(one, depth + 1) for one in part]
    if isinstance(part, itertools.count):
        return repr(part)
    if is_iterator(part):
        return mark_of(part, depth)
    return part if isinstance(part, _PLAIN) else id(part)


def _of_generator(generator: types.GeneratorType[Any, Any, Any]) -> Any:
    frame = generator.gi_frame
    if frame is None:
        return "over"
    known = frame.f_locals.items()
    plain = {n: v for n, v in known if isinstance(v, _PLAIN)}
    inner = {n: mark_of(v, DEEPEST) for n, v in known if is_iterator(v)}
    return [frame.f_lasti, plain, inner, *map(id, frame.f_locals.values())]
