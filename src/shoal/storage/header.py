"""The header of a safetensors file: which tensor lies where. Pure: bytes in, entries out.

    8 bytes      n, little-endian
    n bytes      {"NAME":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},...} and spaces
    the rest     the tensors, in the order of the header, without gaps

The reader takes nothing else, so it is not a JSON parser: one pass of a regular expression,
whose memory is that of the tensors it finds. A general parser would take a hostile header of
16 MiB for a gigabyte of lists.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
MAX_BYTES = 16 << 20
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 64
MAX_NAME_BYTES = 4096
_LENGTH_BYTES = 8
_RESERVED = "__metadata__"

_NUMBER = rb"(0|[1-9][0-9]{0,17})"
_NAME = re.compile(rb'("[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+")')
_ENTRY = re.compile(
    rb':\{"dtype":"([A-Z0-9_]{1,16})","shape":\[([0-9,]{0,1300}+)\],'
    rb'"data_offsets":\[%s,%s\]\}([,}])' % (_NUMBER, _NUMBER)
)
_DIMENSION = re.compile(_NUMBER)


class Entry(NamedTuple):
    """One tensor of a file; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def arrange(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Entry]:
    """Where each tensor of (dtype, shape) will lie: wide types first, so all are aligned.

    Raises:
        ValueError: a name, a dtype or a shape that no reader would take.
    """
    for name, (dtype, shape) in tensors.items():
        _check(name, dtype, shape)
    order = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name][0]], name))
    entries, begin = {}, 0
    for name in order:
        dtype, shape = tensors[name]
        end = begin + ITEM_BYTES[dtype] * math.prod(shape)
        entries[name] = Entry(dtype, shape, begin, end)
        begin = end
    return entries


def encode(entries: Mapping[str, Entry]) -> bytes:
    """The header with its length, filled with spaces to a multiple of 8 bytes.

    Raises:
        ValueError: it would be too long to be read again.
    """
    record = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        for name, (dtype, shape, begin, end) in entries.items()
    }
    text = json.dumps(record, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_BYTES or len(entries) > MAX_TENSORS:
        raise ValueError(
            f"{len(entries)} tensors with a header of {len(text)} bytes; a file holds "
            f"{MAX_TENSORS} and {MAX_BYTES}. Store them in several files"
        )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def length(start: bytes, file_bytes: int) -> int:
    """The header's length with its own 8 bytes, from the first 8 of a file.

    Raises:
        ValueError: it cannot be one.
    """
    found = int.from_bytes(start, "little") + _LENGTH_BYTES
    if found > min(file_bytes, MAX_BYTES + _LENGTH_BYTES):
        raise ValueError(
            f"its header would have {found} bytes; the file has {file_bytes}, a header at most "
            f"{MAX_BYTES}"
        )
    return found


def parse(text: bytes, data_bytes: int) -> dict[str, Entry]:
    """The entries of a header, which must cover ``data_bytes`` exactly and in order.

    Raises:
        ValueError: it says anything else.
    """
    text = text.rstrip(b" ")
    if text[:1] != b"{":
        raise ValueError("its header is no JSON object")
    entries: dict[str, Entry] = {}
    position, end, more = 1, 0, text != b"{}"
    while more:
        name, entry, more, position = _next(text, position)
        if name in entries or len(entries) == MAX_TENSORS:
            raise ValueError(f"tensor {name!r} is there twice, or the {MAX_TENSORS + 1}th")
        if entry.begin != end:
            raise ValueError(f"tensor {name!r} starts at {entry.begin}, {end} is expected")
        entries[name], end = entry, entry.end
    if end != data_bytes or (entries and position != len(text)):
        raise ValueError(f"its tensors have {end} bytes, {data_bytes} are there")
    return entries


def _next(text: bytes, position: int) -> tuple[str, Entry, bool, int]:
    """The entry at ``position``, whether another follows, and where."""
    found = _NAME.match(text, position)
    fields = _ENTRY.match(text, found.end()) if found else None
    if not found or not fields:
        raise ValueError(f"byte {position} of its header starts no tensor")
    name, dtype = json.loads(found[1].decode()), fields[1].decode()
    shape = _shape(fields[2])
    _check(name, dtype, shape)
    entry = Entry(dtype, shape, int(fields[3]), int(fields[4]))
    if entry.end - entry.begin != ITEM_BYTES[dtype] * math.prod(shape):
        raise ValueError(f"{name!r}, {dtype} of {shape}, has {entry.end - entry.begin} bytes")
    return name, entry, fields[5] == b",", fields.end()


def _shape(text: bytes) -> tuple[int, ...]:
    if not text:
        return ()
    found = [_DIMENSION.fullmatch(part) for part in text.split(b",")]
    if not all(found):
        raise ValueError(f"{text[:100]!r} is no shape")
    return tuple(int(part[1]) for part in found if part)


def _check(name: str, dtype: str, shape: Iterable[int]) -> None:
    """Raise for what no file may hold; sizes stay below 2**63 for every reader."""
    if len(name.encode()) > MAX_NAME_BYTES:  # a UnicodeEncodeError is a ValueError
        raise ValueError(f"a tensor's name has {len(name)} letters, {MAX_NAME_BYTES} is the most")
    if name == _RESERVED or dtype not in ITEM_BYTES:
        raise ValueError(f"{name!r} of dtype {dtype!r} is no tensor that a file may hold")
    dimensions = tuple(shape)
    largest = ITEM_BYTES[dtype] * math.prod(max(size, 1) for size in dimensions)
    if min(dimensions, default=0) < 0 or len(dimensions) > MAX_DIMENSIONS or largest >= 1 << 63:
        raise ValueError(f"{name!r} has the impossible shape {dimensions}")
