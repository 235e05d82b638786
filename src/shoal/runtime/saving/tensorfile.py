"""Torch tensors to and from the files of a generation, byte by byte."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.core.errors import StorageError, TrialError
from shoal.memory.store import bytes_of
from shoal.storage.generations import Generation

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

Row = tuple[str, str, tuple[int, ...], memoryview]


def row(name: str, tensor: Tensor) -> Row:
    """What ``write_tensors`` takes; the memory is the tensor's own where it is contiguous.

    Raises:
        TrialError: the format has no name for its type.
    """
    if tensor.dtype not in _NAMES:
        raise TrialError(
            f"tensor {name!r} is of {tensor.dtype}, which a checkpoint cannot hold. Keep it in "
            f"one of {', '.join(sorted(_DTYPES))}."
        )
    return name, _NAMES[tensor.dtype], tuple(tensor.shape), _bytes_of(tensor.contiguous())


def read_tensors(generation: Generation, file_name: str) -> dict[str, Tensor]:
    """All tensors of one file, each in memory of its own.

    Raises:
        StorageError: a byte is not the one that was written.
    """
    found: dict[str, Tensor] = {}
    with generation.open(file_name) as file:
        for name, entry in file.entries.items():
            data = torch.frombuffer(file.read(name) or bytearray(8), dtype=torch.uint8)
            size = entry.end - entry.begin
            found[name] = data[:size].view(_DTYPES[entry.dtype]).reshape(entry.shape)
    return found


def read_into(generation: Generation, file_name: str, places: Mapping[str, Tensor]) -> None:
    """Fill each place that the file has a tensor for.

    Raises:
        StorageError: a byte is not the one that was written, or a tensor is another's.
    """
    with generation.open(file_name) as file:
        for name, place in places.items():
            entry = file.entries.get(name)
            if entry is None:
                continue
            if (entry.dtype, entry.shape) != (_NAMES.get(place.dtype), tuple(place.shape)):
                raise StorageError(
                    f"{name!r} in {generation.path} is {entry.dtype} of shape {entry.shape}, the "
                    f"model's is {_NAMES.get(place.dtype)} of {tuple(place.shape)}: it was "
                    "written by another model. Train this one from its start."
                )
            target = (
                place if place.is_contiguous() else torch.empty(place.shape, dtype=place.dtype)
            )
            file.read_into(name, _bytes_of(target))
            if target is not place:
                place.copy_(target)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    if not tensor.numel():
        return memoryview(b"")
    return bytes_of(tensor).numpy().data
