"""Messages between stages: any structure of tensors as one flat frame and its form.

The *form* is the structure without the values: names, shapes, strides, plain Python values. It
seldom changes, and is sent only when it does; so a message is one frame of known size. Where
frames go from device to device it is two: what lies on the device, and what lies on the host.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.units import round_up
from shoal.memory.store import describe, view
from shoal.rng import RngState

ALIGNMENT = 64


class Bundle(NamedTuple):
    """Tensors that go in one frame, where ``offsets`` say."""

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
        inside = _bundle(t for t in pickler.tensors if t.device != apart)
        beside = _bundle(t for t in pickler.tensors if t.device == apart)
        offsets = {False: iter(inside.offsets), True: iter(beside.offsets)}
        places = [
            (describe("", tensor), next(offsets[tensor.device == apart]), tensor.device == apart)
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


def _bundle(tensors: Iterable[Tensor]) -> Bundle:
    found, offsets, size = tuple(tensors), [], 0
    for tensor in found:
        offsets.append(size)
        size = round_up(size + tensor.numel() * tensor.element_size(), ALIGNMENT)
    return Bundle(found, tuple(offsets), size)


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
