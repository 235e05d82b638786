"""A pass as a CUDA graph: the kernels that the eager pass launches, launched as one.

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

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.runtime.replay import Found, Moved, Pass, in_words

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

    def capture(self, works: Sequence[Callable[[], Any]]) -> Launch:
        """Capture these, each a branch that comes after nothing of the others."""
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

    def capture(self, works: Sequence[Callable[[], Any]]) -> Launch:
        """One graph with a memory pool of its own; several works are parallel branches."""
        torch.cuda.synchronize(self._device)
        graph: Any = torch.cuda.CUDAGraph()
        # Other threads of this process, which copy, may call CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            main = torch.cuda.current_stream(self._device)
            streams = [torch.cuda.Stream(self._device) for _ in works[1:]]
            for stream, work in zip(streams, works[1:], strict=True):
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    work()
            works[0]()
            for stream in streams:
                main.wait_stream(stream)
        found: Launch = graph
        return found


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
        self.copy_in(leaves)
        assert self._launch is not None
        self._launch.replay()
        return self.found

    def copy_in(self, leaves: Sequence[Tensor]) -> None:
        """Have a batch where the graph reads it."""
        for mine, leaf in zip(self._inputs, leaves, strict=True):
            mine.copy_(leaf, non_blocking=True)

    @property
    def found(self) -> Found:
        """Where the last capture of ``work`` leaves what it finds."""
        assert self._found is not None
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
            self._launch = self._cuda.capture([self.work])

    def work(self) -> None:
        """The pass by its code, from where ``copy_in`` puts a batch: what is captured."""
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


def branches(passes: Sequence[CapturedPass], cuda: Cuda) -> Callable[[Sequence[Any]], list[Found]]:
    """The passes of several trials as parallel branches of one graph.

    What it returns takes the leaves of a batch for each, launches, and returns what each left.
    Their random streams have to be one trial's at a time, so none of them may draw.
    """
    launch = cuda.capture([one.work for one in passes])
    results = [one.found for one in passes]

    def run(leaves: Sequence[Any]) -> list[Found]:
        for one, mine in zip(passes, leaves, strict=True):
            one.copy_in(mine)
        launch.replay()
        return results

    return run


def _laid(gradient: Tensor, like: nn.Parameter, taken: Collection[int]) -> Tensor:
    """A gradient that lies in memory as its parameter does, and nobody else's does."""
    if gradient.stride() == like.stride() and gradient.data_ptr() not in taken:
        return gradient
    return torch.empty_strided(
        like.shape, like.stride(), dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)
