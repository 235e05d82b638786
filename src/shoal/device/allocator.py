"""What kernels and libraries take of a GPU beside tensors, as its allocator's statistics tell.

[Note: what is asked of the allocator]
Scratch memory of a kernel (a cuDNN convolution's, a sort's) comes from the allocator that tensors
come from, and is given back before the operator returns: no tensor shows it. The allocator's
statistics do: the most bytes there were since they were reset. So they are reset before each
operator that is counted, and read after it. What other threads take meanwhile is in it too.

Counted are bytes as they were asked for, which is how tensors are counted: what the allocator
rounds up to (512 bytes, and up to 1 MiB of a large block) depends on what it has to hand. An
allocator that does not keep that tells bytes as it gave them out, with its rounding. The device's
peak that is shown is with rounding. Resets would lose it, so it is kept here (``peak_bytes``).

Reading statistics launches nothing, yet nothing is asked while a CUDA graph is captured: what it
takes is in a memory pool of its own, and stays.

The calls are behind ``Calls``, so that what is done with them can be tested without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from shoal.core.units import Bytes

_SIDE = 256  # of the products that have libraries make what they keep


class Reading(NamedTuple):
    """Bytes that are taken now, the most since the last reset, and that with rounding."""

    asked: int
    most_asked: int
    most_given: int


class Calls(Protocol):
    """What is asked of an allocator."""

    def read(self) -> Reading:
        """Its statistics now."""
        ...

    def reset(self) -> None:
        """From now on the most is what there is, or more."""
        ...

    def is_busy(self) -> bool:
        """Whether a graph is being captured in this thread."""
        ...


class Allocator:
    """The allocator of one GPU, for whoever counts bytes; its statistics are the process's."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._most = 0  # before the last reset

    def before(self) -> int | None:
        """The bytes there are before an operator; None where nothing may be asked."""
        if self._calls.is_busy():
            return None
        reading = self._calls.read()
        self._most = max(self._most, reading.most_given)
        self._calls.reset()
        return reading.asked

    def rise(self, before: int) -> int:
        """The most bytes on top of what there was ``before`` an operator that has returned."""
        return max(0, self._calls.read().most_asked - before)

    @property
    def peak_bytes(self) -> int:
        """The most there were at a time since ``forget``, through all resets in between."""
        return max(self._most, self._calls.read().most_given)

    def forget(self) -> None:
        """Forget the peak so far: from now on it is what there is, or more."""
        self._calls.reset()
        self._most = 0


class _CudaCalls:
    def __init__(self, index: int) -> None:
        self._index = index
        is_torchs = torch.cuda.get_allocator_backend() == "native"  # the other counts none asked
        self._is_capturing = torch.cuda.is_current_stream_capturing  # whatever others are told
        self._asked = "requested_bytes" if is_torchs else "allocated_bytes"

    def read(self) -> Reading:
        found = torch.cuda.memory_stats_as_nested_dict(self._index)
        asked, given = found[self._asked]["all"], found["allocated_bytes"]["all"]
        return Reading(asked["current"], asked["peak"], given["peak"])

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._index)

    def is_busy(self) -> bool:
        return bool(self._is_capturing())


def allocator_here() -> Allocator | None:
    """That of the GPU this thread uses; None where it uses none, or that keeps no statistics."""
    if not torch.cuda.is_initialized():
        return None
    return allocator_of(torch.cuda.current_device())


@functools.cache
def allocator_of(index: int) -> Allocator | None:
    """The one of a GPU; None of one that keeps no statistics, such as a library's own."""
    calls = _CudaCalls(index)
    try:
        calls.read()
    except (RuntimeError, KeyError):
        return None
    return Allocator(calls)


def held_by_libraries(device: torch.device, allocated: Callable[[], int]) -> Bytes:
    """The bytes that libraries keep of a device for good, with which trials have to do without.

    cuBLAS takes a workspace at the first product of each thread and stream: for forwards in this
    thread, for backwards in autograd's. So products of both are done on the current stream, and
    what is ``allocated`` when nothing of them is left, nor anything of a trial, is theirs. That
    of streams on which graphs are captured comes later, and is not in it: as much again for each.
    """
    gc.collect()  # what is left of an earlier study is nobody's
    for dtype in (torch.float32, torch.bfloat16):
        with contextlib.suppress(RuntimeError):  # not every GPU has both
            _multiply(device, dtype)
    return Bytes(allocated())


def _multiply(device: torch.device, dtype: torch.dtype) -> None:
    """Forward and backward of a product; draws nothing."""
    rows = torch.ones(_SIDE, _SIDE, dtype=dtype, device=device)
    weight, bias = torch.ones_like(rows, requires_grad=True), torch.ones_like(rows[0])
    functional.linear(rows, weight, bias.requires_grad_()).sum().backward()
