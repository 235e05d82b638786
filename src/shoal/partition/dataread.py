"""Whether code writes into what it reads of a tensor by ``.data``, or into its memory by NumPy.

[Note: what .data counts]
A tensor counts the writes to it, those by ``detach()`` and by views among them. ``tensor.data``
is an alias with a count of its own, which begins at 0 and is lost with it:

    w.mul_(2)  w.detach().mul_(2)  w[0].mul_(2)      w._version is one more
    w.data.mul_(2)  w.data[0].mul_(2)                only that alias has counted

So the aliases that were handed out are kept until the code is through, and asked. For that the
attribute is another one since somebody first wanted to know, which does what torch's does, and is
torch's own to who asks the class for it (``Tensor.data.__get__``, as modes do).

[Note: what nobody counts]
NumPy, and whoever is told an address, writes without torch:

    w.detach().numpy()[0] = 2    np.clip(np.asarray(w.detach()), -1, 1, out=...)
    np.from_dlpack(w.detach())   numba or ctypes at w.data_ptr()

So those three ways are watched as ``.data`` is: what the memory holds is noted when it is first
handed out, as a hash, and compared at the end. An address on a GPU is no such way, since kernels
that read take it in each call. Compiled code that is given tensors themselves is not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from xxhash import xxh3_64_intdigest

from shoal.partition.wires import storage_key

_TORCHS: Any = Tensor.data
_WAYS = ("numpy", "__dlpack__", "data_ptr")
"""To a tensor's memory."""
_numpy: Any = Tensor.numpy
address_of = Tensor.data_ptr
"""What ``tensor.data_ptr()`` is, of which nobody takes note."""
plain_data = _TORCHS.__get__
"""What ``tensor.data`` is, of which nobody takes note."""
_watching: list[DataReads] = []  # in all threads: autograd has its own, which run users' hooks


class DataReads:
    """What ``.data`` gives of these tensors' memory inside."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._aliases: dict[int, list[Tensor]] = {}  # made when something asks for ``.data``
        self._places: dict[int, list[int]] = {}  # by storage
        self._held: dict[int, int] = {}  # what was in the memory that was handed out, by place

    def __enter__(self) -> Self:
        _install()
        _watching.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _watching.remove(self)

    def note(self, alias: Tensor) -> None:
        """It gave this."""
        if not self._aliases:
            self._aliases = {storage_key(tensor): [] for tensor in self._tensors}
        with suppress(NotImplementedError):  # within torch.func a tensor has no memory to tell
            if (known := self._aliases.get(storage_key(alias))) is not None:
                known.append(alias)

    def note_memory(self, given: Tensor) -> None:
        """Its memory is handed out."""
        if not self._places:
            for place, tensor in enumerate(self._tensors):
                self._places.setdefault(storage_key(tensor), []).append(place)
        with suppress(NotImplementedError):
            for place in self._places.get(storage_key(given), ()):
                if place not in self._held:
                    self._held[place] = contents(self._tensors[place])

    def __bool__(self) -> bool:
        """Whether something asked for ``.data``, or for memory."""
        return bool(self._aliases or self._held)

    def wrote_to(self, place: int) -> bool:
        """Whether code wrote into what it was given of the tensor at this place."""
        tensor = self._tensors[place]
        if place in self._held and contents(tensor) != self._held[place]:
            return True
        return any(
            alias._version and _overlap(alias, tensor)  # others may lie in the same memory
            for alias in self._aliases.get(storage_key(tensor), ())
        )


def contents(tensor: Tensor) -> int:
    """A hash of what is in a tensor's memory, which another one hardly has."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        plain = plain_data(tensor)
        if not torch.ops.aten.is_non_overlapping_and_dense(plain):
            plain = plain.clone(memory_format=torch.contiguous_format)
        flat = plain.as_strided((plain.numel(),), (1,))
        if plain.device.type == "cpu":
            return int(xxh3_64_intdigest(_numpy(flat.view(torch.uint8)).data))
        flat = torch.view_as_real(flat) if flat.is_complex() else flat
        return int(torch.hash_tensor(flat).item())


def _overlap(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided:
        return True
    (first, last), (start, end) = _span(one), _span(other)
    return first < end and start < last


def _span(tensor: Tensor) -> tuple[int, int]:
    """From which byte to which it lies."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    start = address_of(tensor)
    return start, start + reach * tensor.element_size()


@functools.cache
def _install() -> None:
    Tensor.data = _Data()  # type: ignore[assignment]
    for name in _WAYS:
        setattr(Tensor, name, _Way(getattr(Tensor, name), any_device=name != "data_ptr"))


class _Data:
    """In place of torch's attribute."""

    def __get__(self, tensor: Tensor | None, kind: type | None = None) -> Any:
        if tensor is None:
            return _TORCHS
        alias = plain_data(tensor)
        for reads in _watching:
            reads.note(alias)
        return alias

    def __set__(self, tensor: Tensor, value: Tensor) -> None:
        _TORCHS.__set__(tensor, value)

    def __delete__(self, tensor: Tensor) -> None:
        _TORCHS.__delete__(tensor)


class _Way:
    """In place of a method that hands out memory."""

    def __init__(self, method: Any, *, any_device: bool) -> None:
        self._method, self._any_device = method, any_device

    def __get__(self, tensor: Tensor | None, kind: type | None = None) -> Any:
        if tensor is None:
            return self._method
        if _watching and (self._any_device or tensor.device.type == "cpu"):
            for reads in _watching:
                reads.note_memory(tensor)
        return self._method.__get__(tensor, kind)
