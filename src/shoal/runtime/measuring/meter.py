"""What measuring holds of a device, counted against its budget; more is refused as a GPU does.

A virtual device's memory is the host's: what is on it is what was brought (``hold``) or made while
it was counted. What measuring keeps in host memory is not on the device, on any kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from shoal.core.units import Bytes, format_bytes
from shoal.partition.track import AllocationTracker, read_bytes
from shoal.recipes.several import entries_of

Key = TypeVar("Key", bound=Hashable)
HOST = torch.device("cpu")


class Meter:
    """Counts the bytes of one device; ``peak_bytes`` are the most there were at a time."""

    def __init__(self, device: torch.device, budget: Bytes) -> None:
        self.device, self.budget = device, budget
        self.held_bytes = self.peak_bytes = 0
        self._kind = None if device.type == "cpu" else device.type

    @contextmanager
    def hold(self, tensors: Iterable[Tensor], rows: Iterable[Tensor] = ()) -> Iterator[None]:
        """Room for these inside; they come to the device there. ``rows`` are of batches.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        size = stored_bytes(tensors) + sum(read_bytes(rows).values())
        if self.held_bytes + size > self.budget:
            raise out_of_memory(size, self.budget - self.held_bytes)
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        try:
            yield
        finally:
            self.held_bytes -= size

    @contextmanager
    def counting(self) -> Iterator[AllocationTracker]:
        """What is made inside, beside what is held.

        Raises:
            torch.OutOfMemoryError: it is more than the device has.
        """
        tracker = AllocationTracker(self._kind, limit=self.budget - self.held_bytes)
        try:
            with tracker:
                yield tracker
        finally:
            most = min(self.budget, self.held_bytes + tracker.peak_bytes)
            self.peak_bytes = max(self.peak_bytes, most)


def reserved_bytes(device: torch.device) -> int:
    """What torch has of a GPU's memory when it has given back what it can; 0 of a CPU."""
    if device.type == "cpu":
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))


def free_bytes(device: torch.device) -> int:
    """What a GPU has left for this process when torch has given back what it can.

    That is no more than what is left of this process's share (``CudaDevice``).
    """
    taken = reserved_bytes(device)
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device) * total
    return int(min(free, max(0, share - taken)))


def out_of_memory(size: int, free: int) -> torch.OutOfMemoryError:
    """As a GPU says it."""
    return torch.OutOfMemoryError(
        f"cannot allocate memory on the device: {format_bytes(Bytes(size))} were asked for, "
        f"{format_bytes(Bytes(max(0, free)))} are free"
    )


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the storages behind them, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def copied_to(device: torch.device, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Copies on ``device`` that lie in memory as these do, and share what these share."""
    storages: dict[int, torch.UntypedStorage] = {}
    found = {}
    for key, tensor in tensors.items():
        one = tensor.detach()
        storage = one.untyped_storage()
        if storage.data_ptr() not in storages:
            made = torch.UntypedStorage(storage.nbytes(), device=device)
            storages[storage.data_ptr()] = made.copy_(storage)
        there = torch.empty(0, dtype=one.dtype, device=device)
        there.set_(storages[storage.data_ptr()], one.storage_offset(), one.size(), one.stride())
        found[key] = there
    return found


def rest_on_host(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None] | None:
    """Have a GPU's memory be free of what was measured of a trial; None: nothing of it is there.

    What is returned brings it back.
    """
    where = next((p.device for p in model.parameters() if p.device != HOST), None)
    if where is None:
        return None
    model.to(HOST)
    for parameter in model.parameters():
        parameter.grad = None
    there = [
        (entry, key)
        for entry in entries_of(optimizer)
        for key, value in entry.items()
        if isinstance(value, Tensor) and value.device == where
    ]
    for entry, key in there:
        entry[key] = entry[key].cpu()
    torch.cuda.empty_cache()

    def come_back() -> None:
        model.to(where)
        for entry, key in there:
            entry[key] = entry[key].to(where)

    return come_back


class Resting:
    """What was measured of a trial alone: it makes room for arrays on a GPU, and comes back."""

    def __init__(self) -> None:
        self._back: Callable[[], None] | None = None

    def rest(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """It is on the host from now on."""
        if self._back is None:
            self._back = rest_on_host(model, optimizer)

    def come_back(self, is_wanted: bool) -> bool:
        """Whether it is where it was; it is to be let go of where it is not."""
        back, self._back = self._back, None
        if back is None or not is_wanted:
            return back is None
        try:
            back()
        except torch.OutOfMemoryError:
            return False
        return True
