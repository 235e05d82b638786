"""JSON documents, strict in both directions: what can be written can be read, and nothing else.

Floats that are not finite are written as ``core.floats`` says.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from shoal.core.errors import StorageError
from shoal.core.floats import decode_floats, encode_floats, may_hold_floats
from shoal.storage.failures import damaged
from shoal.storage.files import replace_file
from shoal.storage.reading import read_file

MAX_BYTES = 16 << 20
MAX_VALUES = 1 << 20  # Python needs about a hundred bytes for each


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` in one step; durable when this returns."""
    replace_file(path, encode(value, path, indent=1) + b"\n")


def read_json(path: Path) -> Any:
    """What ``write_json`` wrote; tuples come back as lists.

    Raises:
        StorageError: the file is damaged, or gone.
    """
    try:
        return decode(read_file(path, MAX_BYTES))
    except ValueError as error:
        raise damaged(path, str(error)) from error


def encode(value: Any, path: Path, *, indent: int | None = None) -> bytes:
    """``value`` as JSON in ASCII, for the file ``path``.

    Raises:
        StorageError: JSON has no words for it, or ``decode`` would refuse it.
    """
    try:
        text = json.dumps(encode_floats(value, _key), allow_nan=False, indent=indent).encode(
            "ascii"
        )
        decode(text)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise StorageError(
            f"cannot write {path}: {reason}. A document holds numbers, strings, lists, and "
            f"mappings by name; at most {MAX_VALUES} of them in {MAX_BYTES} bytes."
        ) from error
    return text


def decode(data: bytes) -> Any:
    """The value of a JSON text from anywhere; takes at most some hundred MiB.

    Raises:
        ValueError: it is no JSON, names a key twice, or is larger than shoal writes.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes of JSON, at most {MAX_BYTES} are expected")
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > MAX_VALUES:
        raise ValueError(f"about {values} JSON values, at most {MAX_VALUES} are expected")
    try:
        text = data.decode()
        found = _DECODER.decode(text)
        return decode_floats(found) if may_hold_floats(text) else found
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is in its JSON twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} in its JSON is no finite float")
    return value


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_refuse)


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the key {key!r} is no string")
    return key
