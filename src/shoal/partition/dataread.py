"""Whether code writes into what it reads of a tensor by ``.data``.

[Note: what .data counts]
A tensor counts the writes to it, those by ``detach()`` and by views among them. ``tensor.data``
is an alias with a count of its own, which begins at 0 and is lost with it:

    w.mul_(2)  w.detach().mul_(2)  w[0].mul_(2)      w._version is one more
    w.data.mul_(2)  w.data[0].mul_(2)                only that alias has counted

So the aliases that were handed out are kept until the code is through, and asked. For that the
attribute is another one since somebody first wanted to know, which does what torch's does, and is
torch's own to who asks the class for it (``Tensor.data.__get__``, as modes do).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor

from shoal.partition.wires import storage_key

_TORCHS: Any = Tensor.data
plain_data = _TORCHS.__get__
"""What ``tensor.data`` is, of which nobody takes note."""
_watching: list[DataReads] = []  # in all threads: autograd has its own, which run users' hooks


class DataReads:
    """What ``.data`` gives of these tensors' memory inside."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._aliases: dict[int, list[Tensor]] = {}  # made when something asks for ``.data``

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

    def __bool__(self) -> bool:
        """Whether something asked for ``.data``."""
        return bool(self._aliases)

    def wrote_to(self, tensor: Tensor) -> bool:
        """Whether code wrote into what it was given of this one."""
        return any(
            alias._version and _overlap(alias, tensor)  # others may lie in the same memory
            for alias in self._aliases.get(storage_key(tensor), ())
        )


def _overlap(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided:
        return True
    (first, last), (start, end) = _span(one), _span(other)
    return first < end and start < last


def _span(tensor: Tensor) -> tuple[int, int]:
    """From which byte to which it lies."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


@functools.cache
def _install() -> None:
    Tensor.data = _Data()  # type: ignore[assignment]


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
