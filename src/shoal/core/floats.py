"""Floats in JSON that JSON has no words for.

JSON has no NaN or infinity, and Python's own spelling of them breaks other readers. So
they are written as the strings "NaN", "Infinity" and "-Infinity", which JavaScript's
Number() and pandas' to_numeric() turn back. A string that reads like one of these gets a
backslash in front, one that already has backslashes one more: nothing is ambiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_floats(value: Any, key: Callable[[Any], Any] = lambda name: name) -> Any:
    """``value`` in containers that JSON has; ``key`` is asked for each mapping's keys."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str) and value.lstrip("\\") in _FLOATS:
        return "\\" + value
    if isinstance(value, Mapping):
        return {key(name): encode_floats(item, key) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_floats(item, key) for item in value]
    return value


def decode_floats(value: Any) -> Any:
    """The inverse of ``encode_floats``; tuples come back as lists."""
    if isinstance(value, str):
        if value in _FLOATS:
            return _FLOATS[value]
        return value[1:] if value.lstrip("\\") in _FLOATS else value
    if isinstance(value, dict):
        return {name: decode_floats(item) for name, item in value.items()}
    if isinstance(value, list):
        return [decode_floats(item) for item in value]
    return value


def may_hold_floats(text: str) -> bool:
    """Whether a JSON text that shoal wrote has to be decoded; most have no such string."""
    return 'NaN"' in text or 'Infinity"' in text
