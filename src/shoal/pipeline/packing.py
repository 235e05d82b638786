"""Messages between stages: any structure of tensors as one flat frame and its form.

The *form* is the structure without the values: names, shapes, strides, plain Python values. It
seldom changes, and is sent only when it does; so a message is one frame of known size. Where
frames go from device to device it is two: what lies on the device, and what lies on the host.

A tensor arrives with the strides that it had, as kernels sum in an order of their own for each. Of
one with gaps between its elements, a chunk of another say, or with elements that are one in
memory, all from its first to its last byte is sent; once for all such tensors of a storage.
"""

from __future__ import annotations

import io
import itertools
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.units import round_up
from shoal.memory.layout import TensorSpec
from shoal.memory.store import describe, view
from shoal.rng import RngState

ALIGNMENT = 64


class Bundle(NamedTuple):
    """Dense tensors that go in one frame, where ``offsets`` say."""

    tensors: tuple[Tensor, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    def write(self, frame: Tensor, at: int) -> None:
        """Copy the tensors into a flat byte tensor."""
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            view(frame, at + offset, describe("", tensor)).copy_(tensor)


class Packed(NamedTuple):
    """A message: its form, its tensors, and those that go in a frame of their own."""

    form: bytes
    inside: Bundle
    apart: Bundle

    @property
    def num_bytes(self) -> int:
        """Of the tensors that are not apart."""
        return self.inside.num_bytes

    def write(self, frame: Tensor, at: int) -> None:
        """Copy the tensors that are not apart into a flat byte tensor."""
        self.inside.write(frame, at)


class Packer:
    """Takes structures apart and puts them together; parameters of the model go by name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        self._parameters = dict(parameters or {})
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}

    def pack(self, tree: Any, apart: torch.device | None = None) -> Packed:
        """The form of ``tree``, and its tensors, which are not copied yet.

        Those on the device ``apart`` go in a frame of their own.
        """
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, self._names)
        pickler.dump(tree)
        inside, here = _laid_out([t for t in pickler.tensors if t.device != apart])
        beside, there = _laid_out([t for t in pickler.tensors if t.device == apart])
        found = {False: iter(here), True: iter(there)}
        places = [
            (*next(found[tensor.device == apart]), tensor.device == apart)
            for tensor in pickler.tensors
        ]
        form = pickle.dumps((buffer.getvalue(), places, beside.num_bytes))
        return Packed(form, inside, beside)

    def unpack(self, form: bytes, frame: Tensor, at: int, apart: Tensor | None = None) -> Any:
        """The structure whose tensors are views of ``frame`` from byte ``at``.

        ``apart`` is the frame of those that went by themselves.
        """
        structure, places, _ = pickle.loads(form)
        tensors = []
        for spec, offset, is_apart in places:
            flat, start = (apart, 0) if is_apart else (frame, at)
            assert flat is not None
            tensors.append(view(flat, start + offset, spec))
        return _Unpickler(structure, tensors, self._parameters).load()


def apart_bytes(form: bytes) -> int:
    """How many bytes of a message of this form go in a frame of their own."""
    _, _, num_bytes = pickle.loads(form)
    return int(num_bytes)


def _laid_out(tensors: Sequence[Tensor]) -> tuple[Bundle, list[tuple[TensorSpec, int]]]:
    """The memory to be sent, and how and where in it each tensor lies."""
    specs = [describe("", tensor) for tensor in tensors]
    spread = [_is_spread(tensor, spec) for tensor, spec in zip(tensors, specs, strict=True)]
    spans: dict[int, tuple[int, int]] = {}  # of storages: their bytes that are sent as they are
    for tensor in itertools.compress(tensors, spread):
        first, last = spans.get(_storage(tensor), (sys.maxsize, 0))
        start, stop = _span(tensor)
        spans[_storage(tensor)] = min(first, start // ALIGNMENT * ALIGNMENT), max(last, stop)
    pieces, offsets, size = list[Tensor](), list[int](), 0
    sent: dict[int, int] = {}
    places: list[tuple[TensorSpec, int]] = []
    for tensor, spec, is_spread in zip(tensors, specs, spread, strict=True):
        key, at = _storage(tensor), size
        if not is_spread or key not in sent:
            sent |= {key: size} if is_spread else {}
            pieces.append(_memory(tensor, *spans[key]) if is_spread else tensor)
            offsets.append(size)
            size = round_up(size + pieces[-1].nbytes, ALIGNMENT)
        if is_spread:
            at = sent[key] + _span(tensor)[0] - spans[key][0]
            spec = replace(spec, stride=tensor.stride())
        places.append((spec, at))
    return Bundle(tuple(pieces), tuple(offsets), size), places


def _is_spread(tensor: Tensor, dense: TensorSpec) -> bool:
    """Whether it has other strides than it would have alone in its memory."""
    is_memory = type(tensor) is Tensor and not (tensor.is_conj() or tensor.is_neg())
    return is_memory and tensor.numel() > 0 and tensor.stride() != dense.stride


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Its first byte in its storage, and the one behind its last."""
    first, size = int(tensor.storage_offset()), tensor.element_size()
    last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (last + 1) * size


def _memory(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Bytes of its storage."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (stop - start,), (1,))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no annotations
    """Leaves the tensors out, and keeps them in ``tensors``."""

    def __init__(self, buffer: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(buffer)
        self.tensors: list[Tensor] = []
        self._names = names
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        if id(value) in self._names:
            return ("parameter", self._names[id(value)])
        if id(value) not in self._places:
            self._places[id(value)] = len(self.tensors)
            self.tensors.append(value.detach())
        return ("tensor", self._places[id(value)])


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, structure: bytes, tensors: list[Tensor], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__(io.BytesIO(structure))
        self._tensors, self._parameters = tensors, parameters

    def persistent_load(self, key: Any) -> Tensor:
        kind, which = key
        return self._tensors[which] if kind == "tensor" else self._parameters[which]


def pack_rng(state: RngState) -> dict[str, Tensor]:
    """A random state as tensors, so that a message's form does not change with it."""
    _, words, gauss = state.python
    kind, keys, position, has_gauss, cached = state.numpy
    assert kind == "MT19937", kind
    packed = {
        "torch": state.torch,
        "python": torch.tensor(words, dtype=torch.int64),
        "gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "place": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
    }
    return packed if state.cuda is None else packed | {"cuda": state.cuda}


def unpack_rng(packed: Mapping[str, Tensor]) -> RngState:
    """The state that ``pack_rng`` took apart; a message may have brought it to a device."""
    packed = {name: tensor.cpu() for name, tensor in packed.items()}
    has_gauss, gauss = packed["gauss"].tolist()
    position, has_cached, cached = packed["place"].tolist()
    keys = packed["numpy"].numpy().astype(np.uint32)
    return RngState(
        packed["torch"].clone(),
        (3, tuple(packed["python"].tolist()), gauss if has_gauss else None),
        ("MT19937", keys, int(position), int(has_cached), cached),
        packed.get("cuda"),
    )
