"""JSON lines that every reader can read, with floats JSON has no words for.

[Note: floats that are not finite]
JSON has no NaN or infinity, and Python's own spelling of them breaks other readers. So
they are written as the strings "NaN", "Infinity" and "-Infinity", which JavaScript's
Number() and pandas' to_numeric() turn back. A string that reads like one of these gets a
backslash in front, one that already has backslashes one more: nothing is ambiguous.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: Any, *, indent: int | None = None) -> str:
    """``value`` as valid JSON; a mapping of any kind is an object."""
    encoder = _ENCODER if indent is None else _encoder(indent)
    try:
        text = encoder.encode(value)
    except ValueError:
        return encoder.encode(_encoded(value))
    return encoder.encode(_encoded(value)) if _may_hold_floats(text) else text


def loads(text: str) -> Any:
    """The inverse of ``dumps``, for text from anywhere.

    Raises:
        ValueError: no JSON, a name twice in an object, a bare NaN, or nesting without end.
    """
    try:
        value = _DECODER.decode(text)
        return _decoded(value) if _may_hold_floats(text) else value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)


def _may_hold_floats(text: str) -> bool:
    return 'NaN"' in text or 'Infinity"' in text


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def _encoder(indent: int | None) -> json.JSONEncoder:
    return json.JSONEncoder(allow_nan=False, default=_plain, indent=indent)


_ENCODER = _encoder(None)


def _encoded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str) and value.lstrip("\\") in _FLOATS:
        return "\\" + value
    if isinstance(value, Mapping):
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, str):
        if value in _FLOATS:
            return _FLOATS[value]
        return value[1:] if value.lstrip("\\") in _FLOATS else value
    if isinstance(value, dict):
        return {key: _decoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return value
