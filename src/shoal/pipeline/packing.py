"""Messages between stages: any structure of tensors as one flat frame and its form.

The *form* is the structure without the values: names, shapes, strides, plain Python values. It
seldom changes, and is sent only when it does; so a message is one frame of known size. Where
frames go from device to device it is two: what lies on the device, and what lies on the host.

A tensor arrives with the strides that it had, as kernels sum in an order of their own for each. Of
one with gaps between its elements, a chunk of another say, the elements are sent, and laid out as
they lay; tensors that lay among each other are laid out in one memory. Of elements that are one in
memory, as in an expanded tensor, one is sent.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
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

    def pack(self, tree: Any, apart: torch.device | None = None, *, widely: bool = True) -> Packed:
        """The form of ``tree``, and its tensors, which are not copied yet.

        Those on the device ``apart`` go in a frame of their own. Unless they may lie ``widely``,
        those of which there is less than there is room between are contiguous when they arrive.
        """
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, self._names)
        pickler.dump(tree)
        inside, here = _laid_out([t for t in pickler.tensors if t.device != apart], widely)
        beside, there = _laid_out([t for t in pickler.tensors if t.device == apart], widely)
        found = {False: iter(here), True: iter(there)}
        places = [
            (next(found[tensor.device == apart]), tensor.device == apart)
            for tensor in pickler.tensors
        ]
        form = pickle.dumps((buffer.getvalue(), places, beside.num_bytes))
        return Packed(form, inside, beside)

    def unpack(self, form: bytes, frame: Tensor, at: int, apart: Tensor | None = None) -> Any:
        """The structure whose tensors are views of ``frame`` from byte ``at``.

        ``apart`` is the frame of those that went by themselves. What is laid out has a memory of
        its own.
        """
        structure, places, _ = pickle.loads(form)
        tensors, memories = [], dict[tuple[bool, int], Tensor]()
        for place, is_apart in places:
            flat, start = (apart, 0) if is_apart else (frame, at)
            assert flat is not None
            tensor = view(flat, start + place.offset, place.spec)
            if (lies := place.lies) is not None:
                key = is_apart, lies.memory
                if key not in memories:
                    memories[key] = torch.empty(lies.size, dtype=torch.uint8, device=flat.device)
                spec = replace(place.spec, stride=lies.stride)
                view(memories[key], lies.at, spec).copy_(tensor)
                tensor = view(memories[key], lies.at, replace(spec, shape=lies.shape))
            tensors.append(tensor)
        return _Unpickler(structure, tensors, self._parameters).load()


def apart_bytes(form: bytes) -> int:
    """How many bytes of a message of this form go in a frame of their own."""
    _, _, num_bytes = pickle.loads(form)
    return int(num_bytes)


class _Lies(NamedTuple):
    """How a tensor lies in a memory that is made where it arrives: number, size, and where."""

    memory: int
    size: int
    at: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Place(NamedTuple):
    """Where in a frame a tensor is, and how; and how it lies afterwards, if otherwise."""

    spec: TensorSpec
    offset: int
    lies: _Lies | None = None


class _Memory(NamedTuple):
    """Tensors, by their numbers, that lie among each other from one byte to another."""

    members: tuple[int, ...]
    start: int
    stop: int


def _laid_out(tensors: Sequence[Tensor], widely: bool) -> tuple[Bundle, list[_Place]]:
    """What is to be sent, and where in it each tensor is, and how it lies where it arrives."""
    pieces, offsets, size = list[Tensor](), list[int](), 0
    places: dict[int, _Place] = {}
    elements = {i: _elements(tensor) for i, tensor in enumerate(tensors) if _is_spread(tensor)}
    memories = sorted(_memories(tensors, elements, widely))
    spread = {member for memory in memories for member in memory.members}

    def put(piece: Tensor) -> int:
        nonlocal size
        pieces.append(piece)
        offsets.append(size)
        size = round_up(size + piece.numel() * piece.element_size(), ALIGNMENT)
        return offsets[-1]

    for index in range(len(tensors)):
        if index not in spread:
            places[index] = _Place(describe("", tensors[index]), put(tensors[index]))
    for number, (members, start, stop) in enumerate(memories):
        first = start // ALIGNMENT * ALIGNMENT
        whole = stop - first <= sum(elements[index].nbytes for index in members)
        offset = put(_bytes_of(tensors[members[0]], first, stop)) if whole else 0
        for index in members:
            tensor, spec = tensors[index], describe("", elements[index])
            at, lying = _span(tensor)[0] - first, (tuple(tensor.shape), tensor.stride())
            if whole:
                spec = replace(spec, shape=lying[0], stride=lying[1])
                places[index] = _Place(spec, offset + at)
            else:
                lies = _Lies(number, stop - first, at, *lying)
                places[index] = _Place(spec, put(elements[index]), lies)
    bundle = Bundle(tuple(pieces), tuple(offsets), size)
    return bundle, [places[index] for index in range(len(tensors))]


def _memories(
    tensors: Sequence[Tensor], elements: Mapping[int, Tensor], widely: bool
) -> Iterator[_Memory]:
    """Those tensors that do not lie as they would alone, by what they are to lie in."""
    places = ((_storage(tensors[index]), *_span(tensors[index]), index) for index in elements)
    among, before = list[_Memory](), 0
    for storage, start, stop, index in sorted(places):
        if among and storage == before and start < among[-1].stop:
            last = among.pop()
            among.append(_Memory((*last.members, index), last.start, max(last.stop, stop)))
        else:
            among.append(_Memory((index,), start, stop))
        before = storage
    for memory in among:
        if _is_close(memory, elements):
            yield memory
            continue
        alone = (_Memory((index,), *_span(tensors[index])) for index in memory.members)
        yield from (one for one in alone if widely or _is_close(one, elements))


def _is_close(memory: _Memory, elements: Mapping[int, Tensor]) -> bool:
    """Whether it has no more gaps than elements."""
    return memory.stop - memory.start <= 2 * sum(elements[i].nbytes for i in memory.members)


def _elements(tensor: Tensor) -> Tensor:
    """One of those that an expanded tensor repeats."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _is_spread(tensor: Tensor) -> bool:
    """Whether it has other strides than it would have alone in its memory."""
    if type(tensor) is not Tensor or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return False
    return tensor.stride() != describe("", tensor).stride


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Its first byte in its storage, and the one behind its last."""
    first, size = int(tensor.storage_offset()), tensor.element_size()
    last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (last + 1) * size


def _bytes_of(tensor: Tensor, start: int, stop: int) -> Tensor:
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
