"""Counts the bytes that tensors take inside a ``with``, operator by operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.core.units import Bytes

_FRESH = ("aten::lift_fresh", "aten::lift_fresh_copy")  # how torch.tensor(...) shows itself


class AllocationTracker(TorchDispatchMode):
    """Measures the storages newly allocated inside the ``with``, backward included.

    ``current_bytes`` are those alive now (it goes on counting down afterwards),
    ``peak_bytes`` the most at any time, ``allocated_bytes`` all of them together. A view is
    not counted, nor what existed before. Scratch memory that a kernel takes and gives
    back inside one operator is not seen. ``device`` restricts the count to one kind, such
    as ``"cuda"``. More than ``limit`` bytes at a time are refused as a device refuses them, with
    ``torch.OutOfMemoryError``: what was made is gone with the error.
    """

    def __init__(self, device: str | None = None, limit: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.current_bytes = 0
        self.peak_bytes = 0
        self.allocated_bytes = 0
        self._device, self._limit = device, limit
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before: set[int] = set()
        if func.name() not in _FRESH:
            _note_storages(args, before)
            _note_storages(kwargs, before)
        output = func(*args, **(kwargs or {}))
        self._see(output, before)
        return output

    def alive(self) -> list[torch.UntypedStorage]:
        """The storages that were allocated inside the ``with`` and are still there."""
        found = (storage() for storage, _ in self._alive.values())
        return [storage for storage in found if storage is not None]

    def restart_peak(self) -> None:
        """Forget the peak so far: from now on it is what is alive, or more."""
        self.peak_bytes = self.current_bytes

    def _see(self, tree: Any, before: Collection[int]) -> None:
        """Count the storages of what an operator returned but those that were there before."""
        if isinstance(tree, Tensor):
            kind = tree.device.type
            if kind == "meta" or self._device not in (None, kind):
                return
            for storage in storages_of(tree):
                key, size = storage._cdata, storage.nbytes()
                if key in self._alive:
                    self._resize(key, size)
                elif key not in before:
                    self._add(storage, key, size)
        elif (parts := _parts(tree)) is not None:
            for part in parts:
                self._see(part, before)

    def _add(self, storage: torch.UntypedStorage, key: int, size: int) -> None:
        self._require(size)
        reference = weakref.ref(storage, lambda _: self._remove(key))
        self._alive[key] = (reference, size)
        self._grow(size)

    def _resize(self, key: int, size: int) -> None:
        reference, old = self._alive[key]
        if size != old:
            self._require(size - old)
            self._alive[key] = (reference, size)
            self._grow(size - old)

    def _require(self, size: int) -> None:
        if self._limit is not None and self.current_bytes + size > self._limit:
            raise torch.OutOfMemoryError(
                f"cannot allocate memory: {size} bytes were asked for beside "
                f"{self.current_bytes}, and there is room for {self._limit}"
            )

    def _grow(self, size: int) -> None:
        self.current_bytes += size
        self.allocated_bytes += max(size, 0)
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _remove(self, key: int) -> None:
        _, size = self._alive.pop(key)
        self.current_bytes -= size


def _note_storages(tree: Any, found: set[int]) -> None:
    """Add the storages of all tensors in an operator's arguments, which are flat or nearly so."""
    if isinstance(tree, Tensor):
        found.update(storage._cdata for storage in storages_of(tree))
    elif (parts := _parts(tree)) is not None:
        for part in parts:
            _note_storages(part, found)


def _parts(tree: Any) -> Iterable[Any] | None:
    """What a container holds; None of anything else."""
    if isinstance(tree, list | tuple):
        return tree
    return tree.values() if isinstance(tree, dict) else None


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The memory of a tensor; of a sparse one that of its indices and values."""
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout is not torch.sparse_coo:
        return []
    return [part.untyped_storage() for part in (tensor._indices(), tensor._values())]


def peak_of(work: Callable[[], object]) -> Bytes:
    """The most bytes that something allocates while it runs."""
    with AllocationTracker() as tracker:
        work()
    return Bytes(tracker.peak_bytes)
