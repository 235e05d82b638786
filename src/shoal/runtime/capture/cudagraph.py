"""A pass as a CUDA graph: the kernels that the eager pass launches, launched as one.

Of a trial alone (``CapturedPass``), by its code, and of an array (``CapturedRun``), by the graph
of its operations. Passes of several trials may be launched side by side (``Lanes``).

[Note: what stays where]
A graph has addresses in it. The trial's parameters and buffers are where they are for the time of
a lease; a batch is copied into tensors that the graph reads; loss and gradients are in the graph's
own memory, a pool beside the allocator's, and are written anew by each replay. Where a parameter
or a buffer has come to be elsewhere, the graph is made again.

The nodes that a gradient ends at in autograd's graph are there as long as the graph is, and have
the stream on which they were made. So nobody may have the graph of an earlier pass while one is
captured: a stream that is not captured would wait for one that is.

Random numbers are the default generator's: torch counts what the kernels of a graph draw, and a
replay goes on from the generator's state then, as the eager kernels would.

The calls of CUDA are behind ``Cuda``, so that the order of what is done here can be tested without
a GPU.
"""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.fusion.crew import Parts, copy_all
from shoal.kernels.kernelchoice import repeatable
from shoal.memory.store import same_bits
from shoal.runtime.capture.replay import Found, Moved, OtherBits, Pass, Untraceable, in_words

WARM_UPS = 2
"""Passes before one is captured: libraries are loaded and make their workspaces in the first."""


SIDES = 4
"""Streams for the steps of optimizers, whose kernels are too small to fill a device."""
REPEATS, LONGEST = 2, 2**16
"""Steps alike before they are captured; and most of all, where that has not been worth it: what a
capture took was not saved by its launches."""


class Launch(Protocol):
    """A graph that was captured."""

    @property
    def is_live(self) -> bool:
        """Whether it can be launched still."""
        ...

    def replay(self) -> None:
        """Launch all of it on the current stream."""
        ...


class Cuda(Protocol):
    """What is asked of CUDA."""

    def warm_up(self, work: Callable[[], Any]) -> None:
        """Do it on a side stream, between two waits of streams for each other."""
        ...

    def capture(self, work: Callable[[], Any], *, collects: bool = True) -> Launch:
        """Capture what it launches; nothing of it is done.

        ``collects``: passes may have left garbage that must not go meanwhile.
        """
        ...

    def beside(self, parts: Parts) -> None:
        """Launch them so that none waits for another, and what follows for all of them."""
        ...


class CudaGraphs:
    """Those that are captured on one stream, which is nobody else's. They run one at a time.

    [Note: workspaces]
    cuBLAS has scratch memory for each stream, whose address is in the graphs that were captured
    there. So two graphs of one stream must not run side by side; and when one of them is freed
    torch gives that memory back, so that the others go too, and are made again when they are
    needed (``Launch.is_live``). The stream is one of high priority: copies, of which torch hands
    out 32 streams in turn, have others, and none of theirs can come into a capture. Those of one
    priority are 32 too: who makes many of these meets a stream of an earlier one's.

    ``apart``: none has such memory, and each may go without the others.
    """

    def __init__(self, device: torch.device, *, apart: bool = False) -> None:
        self._device, self._apart = device, apart
        self.stream: Any = torch.cuda.Stream(device, priority=-1)
        self._sides: list[Any] = []
        self._launches: weakref.WeakSet[_Launched] = weakref.WeakSet()

    def warm_up(self, work: Callable[[], Any]) -> None:
        """On the stream of the captures, as torch asks for before one."""
        with self._aside():
            work()

    def capture(self, work: Callable[[], Any], *, collects: bool = True) -> Launch:
        """One graph with a memory pool of its own.

        Where the work raises, or does what no graph can hold, streams and allocator are as before.
        """
        if collects:
            gc.collect()  # a graph that went while this one is captured would end that
        torch.cuda.synchronize(self._device)
        graph: Any = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        with self._aside(), _no_collection():
            # Other threads of this process, which copy, may call CUDA meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(Exception):  # that it was invalidated: the reason is on its way
                    graph.capture_end()
                self._clean_up(pool)
                raise
            try:
                graph.capture_end()
            except BaseException:
                self._clean_up(pool)
                raise
        found = _Launched(graph, self)
        self._launches.add(found)
        return found

    def beside(self, parts: Parts) -> None:
        """On streams that begin after the current one, which then waits for them."""
        current = torch.cuda.current_stream(self._device)
        while len(self._sides) < min(SIDES, len(parts)):
            self._sides.append(torch.cuda.Stream(self._device, priority=-1))
        used = self._sides[: len(parts)]
        for side in used:
            side.wait_stream(current)
        for at, part in enumerate(parts):
            with torch.cuda.stream(used[at % len(used)]):
                part()
        for side in used:
            current.wait_stream(side)

    def free(self, launch: _Launched) -> None:
        """It is not launched any more; nor is any of its stream, but for those that are apart."""
        torch.cuda.synchronize(self._device)
        if self._apart:
            launch.graph = None
            return
        for other in [*self._launches]:
            other.graph = None
        self._launches.clear()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)

    def _clean_up(self, pool: Any) -> None:
        """After a capture that failed: torch may leave the allocator at its pool.

        Where it does not, the graph gives the pool back when it goes, and a second time is once
        too often. And, before 2.13, torch leaves the generator as one of which a graph draws,
        until a capture ends well.
        """
        index = torch.cuda.current_device()
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(index, pool)  # raises where it is not there
            torch._C._cuda_releasePool(index, pool)
        with suppress(Exception), warnings.catch_warnings(action="ignore"):  # that it is empty
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected inside."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Launched:
    """A graph; when it goes all of its stream go, unless they are apart."""

    def __init__(self, graph: Any, among: CudaGraphs) -> None:
        self.graph, self._among = graph, among

    @property
    def is_live(self) -> bool:
        """Whether it is there."""
        return self.graph is not None

    def replay(self) -> None:
        """On the current stream."""
        self.graph.replay()

    def __del__(self) -> None:
        if self.graph is not None:
            with suppress(Exception):  # the process ends
                self._among.free(self)


class Lanes:
    """Streams of one device, on each of which graphs are captured and run; the others beside them.

    They live as long as this does.
    """

    MOST = 8
    """Each has scratch memory of cuBLAS, tens of MiB."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: list[CudaGraphs] = []
        self._main: Any = None
        self._begin: Any = None
        self._used: dict[int, Any] = {}
        self._waited: dict[int, Any] = {}

    def graphs(self, number: int) -> CudaGraphs:
        """What captures for a lane; its graphs run nowhere else."""
        index = number % self.MOST
        while len(self._graphs) <= index:
            self._graphs.append(CudaGraphs(self._device))
        return self._graphs[index]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Lanes begin after what the current stream has to do, which goes on after them."""
        self._main = torch.cuda.current_stream(self._device)
        self._begin = self._main.record_event()
        try:
            yield
        finally:
            for stream in self._used.values():
                self._main.wait_stream(stream)
            self._main, self._begin, self._used, self._waited = None, None, {}, {}

    @contextmanager
    def lane(self, number: int, *, beside: bool) -> Iterator[None]:
        """What is launched inside is after what this lane, or the stream before, had to do.

        Not ``beside`` other lanes: after all that was launched before, and before what follows.
        """
        stream, lane = self.graphs(number).stream, number % self.MOST
        if not beside:
            for other in (self._main, *self._used.values()):
                stream.wait_stream(other)
        elif self._waited.get(lane) is not self._begin:  # which moves with what ran not beside
            stream.wait_event(self._begin)
            self._waited[lane] = self._begin
        self._used[lane] = stream
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            if not beside:
                self._main.wait_stream(stream)
                self._begin = self._main.record_event()


class CapturedPass:
    """A pass that is replayed as a CUDA graph.

    Made with the trial's random streams in place; the caller puts back what the passes that
    making it takes have drawn and written.

    Raises:
        Untraceable: the code does what a graph cannot hold, such as waiting for the device.
    """

    def __init__(self, what: Pass, leaves: Sequence[Tensor], cuda: Cuda) -> None:
        self._what, self._cuda = what, cuda
        self._inputs = [torch.empty_like(leaf).copy_(leaf) for leaf in leaves]
        self._found: Found | None = None
        self._launch: Launch | None = None
        self._at: list[int] = []
        self._make()

    def run(self, leaves: Sequence[Tensor]) -> Found:
        """Copy the batch in, and launch."""
        if self._launch is None or not self._launch.is_live or self._addresses() != self._at:
            raise Moved
        for mine, leaf in zip(self._inputs, leaves, strict=True):
            mine.copy_(leaf, non_blocking=True)
        assert self._found is not None
        self._launch.replay()
        return self._found

    def let_go(self) -> None:
        """Free the graph with its memory."""
        self._launch = self._found = None
        self._inputs, self._at = [], []

    def _make(self) -> None:
        self._at = self._addresses()
        with in_words():
            for _ in range(WARM_UPS):
                self._cuda.warm_up(self.work)
            self._launch = self._cuda.capture(self.work)

    def work(self) -> None:
        """The pass by its code, on the batch that was copied in: what is captured."""
        loss, root = self._what.loss_and_root(self._inputs)
        found = torch.autograd.grad([root], list(self._what.trained), allow_unused=True)
        there = {index: gradient for index, gradient in enumerate(found) if gradient is not None}
        taken: set[int] = set()
        for index, gradient in there.items():
            there[index] = laid = _laid(gradient, self._what.trained[index], taken)
            taken.add(laid.data_ptr())
        self._found = Found(loss.detach(), there)

    def _addresses(self) -> list[int]:
        model = self._what.model
        return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]


def _laid(gradient: Tensor, like: nn.Parameter, taken: Collection[int]) -> Tensor:
    """A gradient that lies in memory as its parameter does, and nobody else's does."""
    if gradient.stride() == like.stride() and gradient.data_ptr() not in taken:
        return gradient
    return torch.empty_strided(
        like.shape, like.stride(), dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)


class CapturedSteps:
    """The steps of an array's optimizers as one CUDA graph, side by side in it.

    [Note: what a captured step is]
    The kernels are given their numbers when they are captured, a learning rate among them, and
    the addresses of what they step. So a graph stands for a step of the same ``what``; any other
    one is launched call by call, and captured once it has come a few times in a row, twice as many
    after a graph that took longer to make than it has saved. A schedule that goes on at every
    step leaves nothing to capture.
    """

    def __init__(self, cuda: Cuda, clock: Callable[[], float] = time.perf_counter) -> None:
        self._cuda, self._clock = cuda, clock
        self._launch: Launch | None = None
        self._of: Any = None  # which step that is
        self._last: Any = None
        self._times, self._after = 0, REPEATS
        self._call_s = self._took_s = self._saved_s = 0.0
        self.why_not = ""

    def __call__(self, what: Any, parts: Callable[[], Parts]) -> None:
        """Launch them as one, or one by one."""
        is_watched, began = torch._C._len_torch_dispatch_stack() > 0, self._clock()
        if self._launch is not None and not is_watched and what == self._of:
            if self._launch.is_live:
                self._launch.replay()
                self._saved_s += self._call_s - (self._clock() - began)
                return
            self._launch = None
        calls = parts()
        for call in calls:
            call()
        self._call_s = self._clock() - began
        self._times = self._times + 1 if what == self._last else 1
        self._last = what
        if self._times >= self._after and not is_watched and not self.why_not:
            if self._saved_s < self._took_s:
                self._after = min(LONGEST, 2 * self._after)
                self._took_s = self._saved_s = 0.0
            else:
                self._capture(what, calls)

    def _capture(self, what: Any, calls: Parts) -> None:
        """For the next one."""
        self._launch, began = None, self._clock()
        try:
            with in_words(), torch.no_grad():
                work = partial(self._cuda.beside, calls)
                self._launch = self._cuda.capture(work, collects=False)
        except Untraceable as error:
            self.why_not = str(error)
        except (torch.OutOfMemoryError, MemoryError):
            self.why_not = "there is no room for its graph"
        self._of, self._times = what, 0
        self._took_s, self._saved_s = self._clock() - began, 0.0


class CapturedRun:
    """A function of tensors, as a CUDA graph: the operations of an array's pass.

    It is called as the function is. The first ``held`` tensors are read where they are, and the
    graph is made again where they are elsewhere; the others are copied in, and those that
    ``written`` tells of copied back. What it returns is written anew by the next call, unless it
    ``hands_out`` copies. A graph that was made is held against the function at once. Where none
    can be made, or there is no room for one, and while somebody watches what torch does, the
    function is called.
    """

    def __init__(
        self,
        run: Callable[..., Sequence[Tensor]],
        held: int,
        written: Sequence[int],
        cuda: Cuda,
        *,
        hands_out: bool,
    ) -> None:
        self._run, self._held, self._written, self._cuda = run, held, written, cuda
        self._hands_out = hands_out
        self._at: list[int] = []
        self._inputs: list[Tensor] = []
        self._left: Sequence[Tensor] = ()
        self._launch: Launch | None = None
        self.why_not = ""

    def __call__(self, *flat: Tensor) -> Sequence[Tensor]:
        """Launch it."""
        if self.why_not or torch._C._len_torch_dispatch_stack():
            return self._run(*flat)
        at = [tensor.data_ptr() for tensor in flat[: self._held]]
        if self._launch is None or not self._launch.is_live or at != self._at:
            self._make(flat)
            self._at = at
        if self._launch is None or not self._launch.is_live:
            return self._run(*flat)
        with torch.no_grad():
            copy_all(self._inputs, flat[self._held :])
            self._launch.replay()
            mine = [self._inputs[index - self._held] for index in self._written]
            copy_all([flat[index] for index in self._written], mine)
        return [left.clone() for left in self._left] if self._hands_out else self._left

    def _make(self, flat: Sequence[Tensor]) -> None:
        self._launch, self._left = None, ()
        try:
            with in_words(), torch.no_grad():
                self._capture_repeatable(flat)
        except Untraceable as error:
            self.why_not = str(error)
        except (torch.OutOfMemoryError, MemoryError):
            self.why_not = "there is no room for its graph"
        if self.why_not:
            self._launch, self._inputs, self._left = None, [], ()

    def _capture_repeatable(self, flat: Sequence[Tensor]) -> None:
        """With the kernels that there are; with others where those do not repeat themselves."""
        try:
            return self._capture(flat)
        except OtherBits:
            pass  # and with what was raised the first graph goes: the next would go with it
        with repeatable(flat[0].device):
            self._capture(flat)

    def _capture(self, flat: Sequence[Tensor]) -> None:
        held = flat[: self._held]
        self._inputs = [tensor.clone() for tensor in flat[self._held :]]
        mine = (*held, *self._inputs)

        def work() -> None:
            self._left = self._run(*mine)

        for _ in range(WARM_UPS):
            self._cuda.warm_up(work)
        again = [tensor.clone() for tensor in flat[self._held :]]
        expected = self._run(*held, *again)
        launch = self._cuda.capture(work)
        for place, value in zip(self._inputs, flat[self._held :], strict=True):
            place.copy_(value)
        launch.replay()
        pairs = [*zip(self._left, expected, strict=True), *zip(self._inputs, again, strict=True)]
        if not all(same_bits(one, other) for one, other in pairs):
            raise OtherBits("its launch comes to other bits than its operations")
        self._launch = launch
