"""Counts the bytes that tensors take inside a ``with``, operator by operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.core.errors import TrialError
from shoal.core.units import Bytes
from shoal.device.allocator import allocator_here
from shoal.kernels.dispatched import run_operation
from shoal.partition.askers import Askers, AskingForwards

WITHIN = 6  # times the gradients that it makes: more than any in ``askers`` has beside them
_PLACED = {
    torch.ops.aten.as_strided.default: 3,
    torch.ops.aten.as_strided_.default: 3,
    torch.ops.aten.as_strided_copy.default: 3,
    torch.ops.aten.as_strided_scatter.default: 4,
}
"""Operators that may be told where in memory to begin, by which argument."""
_FRESH = ("aten::lift_fresh", "aten::lift_fresh_copy")  # how torch.tensor(...) shows itself


class AllocationTracker(TorchDispatchMode):
    """Measures the storages newly allocated inside the ``with``, backward included.

    ``current_bytes`` are those alive now (it goes on counting down afterwards),
    ``peak_bytes`` the most at any time. A view is not counted, nor what existed before. Scratch
    memory that a kernel takes and gives back inside one operator is in the peak on a GPU, whose
    allocator tells it (``scratch_bytes`` of the peak are that), and is not seen on a CPU.
    ``device`` restricts the count to one kind, such as ``"cuda"``. More than ``limit`` bytes at a
    time are refused as a device refuses them, with ``torch.OutOfMemoryError``: what was made is
    gone with the error. ``resized`` existed before and counts all the same: who owns it gives and
    takes its memory without an operator, as FSDP2 does with gathered parameters. ``as_alone``: a
    step that counts, of a trial that is no array's, has the bits of one that nobody looks at, and
    raises TrialError where it goes by where in memory its weights are.
    """

    def __init__(
        self,
        device: str | None = None,
        limit: int | None = None,
        resized: Iterable[torch.UntypedStorage] = (),
        *,
        as_alone: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.current_bytes = 0
        self.peak_bytes = 0
        self.scratch_bytes = 0
        self._device, self._limit = device, limit
        self._allocator = None if device == "cpu" else allocator_here()
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._resized = {s._cdata: (s, 0) for s in resized}
        self._as_alone = as_alone
        self._askers = Askers(self, self._see_node)
        self._asking = AskingForwards(self._askers) if as_alone else nullcontext()

    def __enter__(self) -> Any:
        self._asking.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._asking.__exit__(kind, error, trace)
        self._askers.restore()
        self._askers.prepare()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._askers.prepare()
        if self._as_alone and func in _PLACED:
            self._require_own_place(args, _PLACED[func], kwargs or {})
        before = set(self._resized)
        self._follow()
        if func.name() not in _FRESH:
            _note_storages(args, before)
            _note_storages(kwargs, before)
        if (allocator := self._allocator) is None or (given := allocator.before()) is None:
            output = run_operation(func, args, kwargs)
            self._askers.see(func, output)
            self._see(output, before)
            return output
        current = self.current_bytes
        output = run_operation(func, args, kwargs)
        self._askers.see(func, output)
        most = current + allocator.rise(given)
        self._see(output, before)
        self._see_inside(most)
        return output

    def alive(self) -> list[torch.UntypedStorage]:
        """The storages that were allocated inside the ``with`` and are still there."""
        found = (storage() for storage, _ in self._alive.values())
        return [storage for storage in found if storage is not None]

    def restart_peak(self) -> None:
        """Forget the peak so far: from now on it is what is alive, or more."""
        self.peak_bytes, self.scratch_bytes = self.current_bytes, 0

    def _require_own_place(self, args: Sequence[Any], at: int, kwargs: Mapping[str, Any]) -> None:
        """Alone a weight has a memory of its own, in which it begins at 0."""
        given = args[at] if len(args) > at else kwargs.get("storage_offset")
        tensor = args[0]
        at_its_own = given in (None, tensor.storage_offset())
        if at_its_own or not tensor.storage_offset():  # where it begins its memory does, as alone
            return
        if tensor.untyped_storage()._cdata not in self._alive:
            raise TrialError(
                f"as_strided is told where in memory to begin (storage_offset={given}) of a "
                "weight, a buffer or a batch: here these are parts of a larger memory, and alone "
                "they are not. Leave it out, and the view begins where the tensor does; to begin "
                "later, slice the tensor first."
            )

    def _follow(self) -> None:
        """Count what those have now that are resized without an operator."""
        for key, (storage, old) in self._resized.items():
            if (size := storage.nbytes()) != old:
                self._resized[key] = (storage, size)
                self._grow(size - old)

    def _see(self, tree: Any, before: Collection[int]) -> None:
        """Count the storages of what an operator returned but those that were there before."""
        if isinstance(tree, Tensor):
            kind = "meta" if isinstance(tree, FakeTensor) else tree.device.type
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

    def _see_node(self, made: Sequence[Any], given: Sequence[Any]) -> None:
        """Count a derivative that ran without this mode, and about what it had within."""
        current, before = self.current_bytes, set(self._resized)
        _note_storages(given, before)
        self._see(made, before)
        self._see_inside(self.current_bytes + WITHIN * (self.current_bytes - current))

    def _see_inside(self, most: int) -> None:
        """Count an operator that had ``most`` bytes at a time, of which tensors are seen."""
        scratch = max(0, most - self.current_bytes)
        self._require(scratch)
        if most > self.peak_bytes:
            self.peak_bytes, self.scratch_bytes = most, scratch

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
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes, self.scratch_bytes = self.current_bytes, 0

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
    """The memory of a tensor; of a sparse one that of its indices and values.

    Zeros that stand for a forward derivative have a storage that holds nothing.
    """
    if tensor.layout is torch.strided:
        return [] if tensor._is_zerotensor() else [tensor.untyped_storage()]
    if tensor.layout is not torch.sparse_coo:
        return []
    return [part.untyped_storage() for part in (tensor._indices(), tensor._values())]


def read_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """By address of the memory behind ``tensors``, the bytes that they read of it.

    A batch that is some rows of a data set may be a view of all of it.
    """
    found: dict[int, int] = {}
    for tensor in tensors:
        storages = storages_of(tensor)
        for storage in storages:
            size = tensor.nbytes if len(storages) == 1 else storage.nbytes()
            key = storage.data_ptr()
            found[key] = min(found.get(key, 0) + size, storage.nbytes())
    return found


def peak_of(work: Callable[[], object], scratch: list[Bytes] | None = None) -> Bytes:
    """The most bytes that something allocates while it runs.

    What of them was scratch memory of a kernel goes to the list ``scratch``.
    """
    with AllocationTracker() as tracker:
        work()
    if scratch is not None:
        scratch.append(Bytes(tracker.scratch_bytes))
    return Bytes(tracker.peak_bytes)
