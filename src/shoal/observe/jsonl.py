"""JSON lines that every reader can read; floats that are not finite as in ``core.floats``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shoal.core.floats import decode_floats, encode_floats, may_hold_floats


def dumps(value: Any, *, indent: int | None = None) -> str:
    """``value`` as valid JSON; a mapping of any kind is an object."""
    encoder = _ENCODER if indent is None else _encoder(indent)
    try:
        text = encoder.encode(value)
    except ValueError:
        return encoder.encode(encode_floats(value))
    return encoder.encode(encode_floats(value)) if may_hold_floats(text) else text


def loads(text: str) -> Any:
    """The inverse of ``dumps``, for text from anywhere.

    Raises:
        ValueError: no JSON, a name twice in an object, a bare NaN, or nesting without end.
    """
    try:
        value = _DECODER.decode(text)
        return decode_floats(value) if may_hold_floats(text) else value
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


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def _encoder(indent: int | None) -> json.JSONEncoder:
    return json.JSONEncoder(allow_nan=False, default=_plain, indent=indent)


_ENCODER = _encoder(None)
