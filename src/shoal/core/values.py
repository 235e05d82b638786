"""What users write for a number, a flag or a list: taken as Python's own, or refused in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from shoal.core.errors import SpecError


def plain(value: Any) -> Any:
    """A NumPy scalar as the Python one that it is; anything else as it is."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return value


def whole(what: str, value: Any, least: int, hint: str = "") -> int:
    """A whole number of at least ``least``.

    Raises:
        SpecError: it is none; ``hint`` says what else to do.
    """
    number = plain(value)
    if type(number) is not int or number < least:
        raise SpecError(f"{what} is a whole number from {least}, got {value!r}.{_more(hint)}")
    return number


def optional_whole(what: str, value: Any, least: int, hint: str = "") -> int | None:
    """The same, or None."""
    return None if value is None else whole(what, value, least, hint)


def flag(what: str, value: Any, hint: str = "") -> bool:
    """True or False.

    Raises:
        SpecError: it is neither.
    """
    found = plain(value)
    if type(found) is not bool:
        raise SpecError(f"{what} is True or False, got {value!r}.{_more(hint)}")
    return found


def optional_flag(what: str, value: Any) -> bool | None:
    """The same, or None."""
    return None if value is None else flag(what, value)


def is_number(value: Any) -> bool:
    """Whether ``value``, a plain one, is a number that can be compared: no boolean, no NaN."""
    return type(value) is int or (type(value) is float and not math.isnan(value))


def one_of(what: str, value: Any, words: Iterable[str]) -> str:
    """One of so many words.

    Raises:
        SpecError: it is none of them.
    """
    known = tuple(words)
    if not isinstance(value, str) or value not in known:
        *others, last = map(repr, known)
        raise SpecError(f"{what} is {', '.join(others)} or {last}, got {value!r}.")
    return next(word for word in known if word == value)


def items(what: str, value: Any, example: str) -> tuple[Any, ...]:
    """The items of a list, tuple, set or range, NumPy scalars as Python's.

    Raises:
        SpecError: it is no list; a string and a mapping are none.
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise SpecError(f"{what} is a list, as in {example}, got {value!r}.")
    return tuple(map(plain, value))


def _more(hint: str) -> str:
    return f" {hint}" if hint else ""


def as_number(what: str, value: Any) -> float:
    """What a metric came to: a number, or a tensor or an array of one.

    Raises:
        SpecError: it is not one number; ``what`` is what returned it.
    """
    shape = getattr(value, "shape", None)
    if not isinstance(value, str) and (shape is None or math.prod(shape) == 1):
        with suppress(TypeError, ValueError):
            return float(value)
    found = type(value).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
    raise SpecError(f"{what} returned {found}; return one number, such as the mean.")
