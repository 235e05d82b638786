"""Messages between stages: any structure of tensors as one flat frame and its form.

The *form* is the structure without the values: names, shapes, strides, plain Python values. It
seldom changes, and is sent only when it does; so a message is one frame of known size.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
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


class Packed(NamedTuple):
    """A message: its form, and its tensors' bytes where ``offsets`` say."""

    form: bytes
    tensors: tuple[Tensor, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    def write(self, frame: Tensor, at: int) -> None:
        """Copy the tensors into a flat byte tensor."""
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            view(frame, at + offset, describe("", tensor)).copy_(tensor)


class Packer:
    """Takes structures apart and puts them together; parameters of the model go by name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        self._parameters = dict(parameters or {})
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}

    def pack(self, tree: Any) -> Packed:
        """The form of ``tree``, and its tensors, which are not copied yet."""
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, self._names)
        pickler.dump(tree)
        offsets, size = [], 0
        for tensor in pickler.tensors:
            offsets.append(size)
            size = round_up(size + tensor.numel() * tensor.element_size(), ALIGNMENT)
        specs = [describe("", tensor) for tensor in pickler.tensors]
        form = pickle.dumps((buffer.getvalue(), specs, offsets))
        return Packed(form, tuple(pickler.tensors), tuple(offsets), size)

    def unpack(self, form: bytes, frame: Tensor, at: int) -> Any:
        """The structure whose tensors are views of ``frame`` from byte ``at``."""
        structure, specs, offsets = pickle.loads(form)
        tensors = [_in_frame(frame, at + o, s) for o, s in zip(offsets, specs, strict=True)]
        return _Unpickler(structure, tensors, self._parameters).load()


def _in_frame(frame: Tensor, offset: int, spec: TensorSpec) -> Tensor:
    return view(frame, offset, spec)


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
