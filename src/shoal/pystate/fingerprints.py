"""Whether a value is the same in two processes, where it is too large to be sent.

A module may draw a table without a seed, or read one from a file that has changed since: each
process that imports it has another one. So the study's process takes a fingerprint of its own,
and a worker compares. It is a CRC of the bytes (1 to 2 GB/s on one core), of at most so many of
each value. Of a larger one blocks from all over it count, so that one that was drawn anew is
always told, and one of which a few rows have changed may not be.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Sized
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.core.units import format_bytes

MOST, LEAST, MOST_OF_ALL = 2**28, 2**20, 2**30
"""Bytes of a value that are looked at: while there is room for that in those of all, and then."""
_BLOCK = 2**16


class Fingerprint(NamedTuple):
    """Equal ones are of equal values, as far as was looked.

    Attributes:
        words: What kind of value it is; for errors too.
        digest: None where nobody can tell.
        most: So many bytes were looked at, or all.
    """

    words: str
    digest: int | None
    most: int = MOST


def of_numbers(value: Tensor | np.ndarray[Any, Any], most: int = MOST) -> Fingerprint:
    """Of a dense tensor, or an array of anything but objects.

    Raises:
        Exception: of this kind nobody can see the bytes.
    """
    kind = "tensor" if isinstance(value, Tensor) else "array"
    dtype = str(value.dtype).removeprefix("torch.")
    shape = " x ".join(map(str, value.shape)) or "one number"
    words = f"a {dtype} {kind} of {shape}, {format_bytes(value.nbytes)}"
    return Fingerprint(words, _crc(_bytes_of(value), most), most)


def in_words(value: Any) -> str:
    """What kind of value it is that is no tensor."""
    with suppress(Exception):  # one that has no length, whatever its code raises
        if isinstance(value, Sized):
            return f"a {type(value).__name__} of {len(value):,} items"
    return f"a {type(value).__name__}"


def of_simple(value: Any) -> Fingerprint:
    """Of a text, bytes, or a list, dict or set of such and of numbers."""
    words = in_words(value)
    if isinstance(value, str | bytes):
        data = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        return Fingerprint(words, zlib.crc32(data))
    if isinstance(value, set):  # in another order in each process
        return Fingerprint(words, sum(zlib.crc32(repr(one).encode()) for one in value))
    file = Checked()
    pickler = pickle.Pickler(file, protocol=4)
    pickler.fast = True  # nothing depends on which parts are one object
    pickler.dump(value)
    return Fingerprint(words, file.crc)


class Checked:
    """A file of which the CRC is kept."""

    crc = 0

    def write(self, data: Any) -> None:
        self.crc = zlib.crc32(data, self.crc)


def _bytes_of(value: Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """In the order of memory, where that is one piece."""
    if isinstance(value, Tensor):
        tensor = value.detach().resolve_conj().resolve_neg()
        if not tensor.numel():
            return np.zeros(0, np.uint8)
        tensor = tensor[tuple(slice(None) if stride else 0 for stride in tensor.stride())]
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
        flat = tensor.contiguous().reshape(-1).view(torch.uint8).cpu()
        found: np.ndarray[Any, Any] = flat.numpy()
        return found
    array = value.T if value.flags.f_contiguous else value
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _crc(data: np.ndarray[Any, Any], most: int) -> int:
    found = 0
    for block in _blocks(data, most):
        found = zlib.crc32(block, found)
    return found


def _blocks(data: np.ndarray[Any, Any], most: int) -> Iterator[Any]:
    if len(data) <= most:
        yield data
        return
    for place in np.linspace(0, len(data) - _BLOCK, most // _BLOCK, dtype=np.int64):
        yield data[place : place + _BLOCK]
