"""Each slot's random numbers: those its trial would draw alone.

A trial alone draws from its process's default generators. In an array each slot has
generators of its own in that state. A mask is filled from the slot's generator directly; an
operation that takes none runs with the defaults set to the slot's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from shoal.rng import RngState

States = list[tuple[torch.Generator, torch.Generator | None]]
"""Of each slot, for the CPU and for a GPU."""


class SlotStreams:
    """Torch's generators of every slot: of the CPU and, on a GPU, of the device.

    A slot that does not take part in a pass draws from a spare, and its own stay put.
    """

    def __init__(self, states: Sequence[RngState], device: torch.device) -> None:
        self.device = device
        self._host = [_host_generator(state) for state in states]
        self._local = [_device_generator(state, device) for state in states]
        self._spare = torch.Generator()
        self._spare_local = None if device.type == "cpu" else torch.Generator(device)
        self._active: Sequence[bool] = [True] * len(states)
        self._kept: States | None = None
        self.drawn = False

    def begin(self, active: Sequence[bool]) -> None:
        """A pass begins, in which ``active`` slots take part; ``undo`` leads back to here."""
        self._active, self._kept, self.drawn = active, None, False

    def undo(self) -> None:
        """Put all generators back to where the pass began."""
        if self._kept is not None:
            self._host = [host for host, _ in self._kept]
            self._local = [local for _, local in self._kept]
        self._kept, self.drawn = None, False

    def generator(self, slot: int) -> torch.Generator:
        """The slot's generator for tensors on the array's device."""
        self._about_to_draw()
        if not self._active[slot]:
            return self._spare_local or self._spare
        return self._local[slot] or self._host[slot]

    @contextmanager
    def as_default(self, slot: int) -> Iterator[None]:
        """The process's generators are the slot's inside, and as they were outside."""
        self._about_to_draw()
        active = self._active[slot]
        host = self._host[slot] if active else self._spare
        local = self._local[slot] if active else self._spare_local
        with _swapped(host, torch.default_generator), _swapped_device(local, self.device):
            yield

    @contextmanager
    def turn(self, slot: int) -> Iterator[None]:
        """The process's generators are the slot's inside; what is drawn there stays drawn."""
        host, local = self._host[slot], self._local[slot]
        with _swapped(host, torch.default_generator), _swapped_device(local, self.device):
            yield

    def states(self, slot: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The slot's states, as ``RngState.torch`` and ``RngState.cuda`` keep them."""
        local = self._local[slot]
        return self._host[slot].get_state(), None if local is None else local.get_state()

    def set(self, slot: int, state: RngState) -> None:
        """Put the slot's generators into ``state``."""
        self._host[slot] = _host_generator(state)
        self._local[slot] = _device_generator(state, self.device)

    @property
    def begun(self) -> States | None:
        """All generators as they were when the pass began; None if it has drawn nothing."""
        return self._kept if self.drawn else None

    def now(self) -> States:
        """Copies of all generators."""
        return _clones(zip(self._host, self._local, strict=True))

    def put(self, states: States) -> None:
        """Have all slots go on from ``states``, which stay as they are."""
        copies = _clones(states)
        self._host = [host for host, _ in copies]
        self._local = [local for _, local in copies]

    def _about_to_draw(self) -> None:
        if not self.drawn:
            self.drawn = True
            self._kept = self.now()


def _clones(states: Iterable[tuple[torch.Generator, torch.Generator | None]]) -> States:
    return [
        (host.clone_state(), None if local is None else local.clone_state())
        for host, local in states
    ]


def _host_generator(state: RngState) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state.torch)
    return generator


def _device_generator(state: RngState, device: torch.device) -> torch.Generator | None:
    if device.type == "cpu" or state.cuda is None:
        return None
    generator = torch.Generator(device)
    generator.set_state(state.cuda)
    return generator


@contextmanager
def _swapped(own: torch.Generator, default: torch.Generator) -> Iterator[None]:
    outer = default.get_state()
    default.set_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(default.get_state())
        default.set_state(outer)


@contextmanager
def _swapped_device(own: torch.Generator | None, device: torch.device) -> Iterator[None]:
    if own is None:
        yield
        return
    outer = torch.cuda.get_rng_state(device)
    torch.cuda.set_rng_state(own.get_state(), device)
    try:
        yield
    finally:
        own.set_state(torch.cuda.get_rng_state(device))
        torch.cuda.set_rng_state(outer, device)
