"""A pass as a CUDA graph: the kernels that the eager pass launches, launched as one.

Of a trial alone (``CapturedPass``), by its code, and of an array (``CapturedRun``), by the graph
of its operations. Passes of several trials may be launched side by side (``Lanes``).

[Note: what stays where]
A graph has addresses in it. The trial's parameters and buffers are where they are for the time of
a lease; a batch is copied into tensors that the graph reads; loss and gradients are in the graph's
own memory, a pool beside the allocator's, and are written anew by each replay. Where a parameter
or a buffer has come to be elsewhere, the graph is made again.

Random numbers are the default generator's: torch counts what the kernels of a graph draw, and a
replay goes on from the generator's state then, as the eager kernels would.

The calls of CUDA are behind ``Cuda``, so that the order of what is done here can be tested without
a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.runtime.replay import Found, Moved, Pass, Untraceable, in_words

WARM_UPS = 2
"""Passes before one is captured: libraries are loaded and make their workspaces in the first."""


class Launch(Protocol):
    """A graph that was captured."""

    def replay(self) -> None:
        """Launch all of it on the current stream."""
        ...


class Cuda(Protocol):
    """What is asked of CUDA."""

    def warm_up(self, work: Callable[[], Any]) -> None:
        """Do it on a side stream, between two waits of streams for each other."""
        ...

    def capture(self, work: Callable[[], Any]) -> Launch:
        """Capture what it launches; nothing of it is done."""
        ...


class CudaGraphs:
    """Those of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def warm_up(self, work: Callable[[], Any]) -> None:
        """On a side stream, as torch asks for before a capture."""
        current, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            work()
        current.wait_stream(side)

    def capture(self, work: Callable[[], Any]) -> Launch:
        """One graph with a memory pool of its own."""
        torch.cuda.synchronize(self._device)
        graph: Any = torch.cuda.CUDAGraph()
        # Other threads of this process, which copy, may call CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        found: Launch = graph
        return found


class Lanes:
    """Streams of one device on which graphs run side by side; they live as long as this does."""

    MOST = 16

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[Any] = []
        self._main: Any = None
        self._used: dict[int, Any] = {}

    @contextmanager
    def together(self) -> Iterator[None]:
        """Lanes begin after what the current stream has to do, which goes on after them."""
        self._main = torch.cuda.current_stream(self._device)
        try:
            yield
        finally:
            for stream in self._used.values():
                self._main.wait_stream(stream)
            self._main, self._used = None, {}

    @contextmanager
    def lane(self, number: int) -> Iterator[None]:
        """What is launched inside is after what this lane, or the stream before, had to do."""
        index = number % self.MOST
        while len(self._streams) <= index:
            self._streams.append(torch.cuda.Stream(self._device))
        stream = self._streams[index]
        if index not in self._used:
            stream.wait_stream(self._main)
            self._used[index] = stream
        with torch.cuda.stream(stream):
            yield


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
        if self._addresses() != self._at:
            raise Moved
        for mine, leaf in zip(self._inputs, leaves, strict=True):
            mine.copy_(leaf, non_blocking=True)
        assert self._launch is not None
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


class CapturedRun:
    """A function of tensors, as a CUDA graph: the operations of an array's pass.

    It is called as the function is. The first ``held`` tensors are read where they are, and the
    graph is made again where they are elsewhere; the others are copied in, and those that
    ``written`` tells of copied back. What it returns is written anew by the next call, unless it
    ``hands_out`` copies. Where no graph can be made it calls the function.
    """

    def __init__(
        self,
        run: Callable[..., Sequence[Tensor]],
        held: int,
        written: Sequence[int],
        cuda: Cuda,
        *,
        hands_out: bool = False,
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
        if self.why_not:
            return self._run(*flat)
        at = [tensor.data_ptr() for tensor in flat[: self._held]]
        if self._launch is None or at != self._at:
            try:
                with in_words():
                    self._make(flat)
            except Untraceable as error:
                self.why_not, self._launch = str(error), None
                self._inputs, self._left = [], ()
                return self._run(*flat)
            self._at = at
        assert self._launch is not None
        rest = flat[self._held :]
        for mine, given in zip(self._inputs, rest, strict=True):
            mine.copy_(given, non_blocking=True)
        self._launch.replay()
        for index in self._written:
            flat[index].copy_(self._inputs[index - self._held], non_blocking=True)
        return [left.clone() for left in self._left] if self._hands_out else self._left

    def _make(self, flat: Sequence[Tensor]) -> None:
        self._inputs = [tensor.clone() for tensor in flat[self._held :]]
        mine = (*flat[: self._held], *self._inputs)

        def work() -> None:
            self._left = self._run(*mine)

        with torch.no_grad():
            for _ in range(WARM_UPS):
                self._cuda.warm_up(work)
            self._launch = self._cuda.capture(work)
