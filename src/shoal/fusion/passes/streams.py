"""Each slot's random numbers: those its trial would draw alone.

A trial alone draws from its process's default generators. In an array each slot has
generators of its own in that state. A mask is filled from the slot's generator directly; an
operation that takes none runs with the defaults set to the slot's state. Python's and NumPy's
streams are each slot's too, for the code that is run for each slot by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from shoal.fusion.declined import Draws
from shoal.rng import Host, RngState, capture_host, host_words, restore_host

Generators = list[tuple[torch.Generator, torch.Generator | None]]
"""Of each slot, for the CPU and for a GPU."""


class States(NamedTuple):
    """A moment of all slots' streams: torch's, and Python's own."""

    torch: Generators
    python: list[Host]


DRAWN = "draws from Python's or NumPy's random numbers, of which there is one stream for all slots"


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """Refuse what draws from Python's own streams inside.

    Raises:
        Draws: it did.
    """
    before = host_words()
    yield
    if host_words() != before:
        raise Draws(f"it {DRAWN}")


class SlotStreams:
    """Generators of every slot: torch's of the CPU and, on a GPU, of the device; Python's own.

    A slot that does not take part in a pass draws from a spare, and its own stay put.
    """

    def __init__(self, states: Sequence[RngState], device: torch.device) -> None:
        self.device = device
        self._host = [_host_generator(state) for state in states]
        self._local = [_device_generator(state, device) for state in states]
        self._python: list[Host] = [(state.python, state.numpy) for state in states]
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
            self._host = [host for host, _ in self._kept.torch]
            self._local = [local for _, local in self._kept.torch]
            self._python = list(self._kept.python)
        self._kept, self.drawn = None, False

    def generator(self, slot: int, device: torch.device | None = None) -> torch.Generator:
        """The slot's generator for tensors on a device; as a rule on the array's."""
        self._about_to_draw()
        is_local = (device or self.device).type != "cpu"
        if not self._active[slot]:
            return (is_local and self._spare_local) or self._spare
        return (is_local and self._local[slot]) or self._host[slot]

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
    def by_itself(self, slot: int, draws_python: bool) -> Iterator[None]:
        """Python's own streams are the slot's inside, which takes part; or they stay put.

        Raises:
            Draws: they were drawn from all the same.
        """
        if not draws_python:
            with nothing_drawn():
                yield
            return
        self._about_to_draw()
        outer = capture_host()
        restore_host(self._python[slot])
        try:
            yield
        finally:
            self._python[slot] = capture_host()
            restore_host(outer)

    @contextmanager
    def turn(self, slot: int) -> Iterator[None]:
        """The process's generators are the slot's inside; what is drawn there stays drawn."""
        host, local = self._host[slot], self._local[slot]
        with _swapped(host, torch.default_generator), _swapped_device(local, self.device):
            yield

    def state(self, slot: int) -> RngState:
        """The slot's streams as they are now."""
        local = self._local[slot]
        drawn = None if local is None else local.get_state()
        return RngState(self._host[slot].get_state(), *self._python[slot], drawn)

    def set(self, slot: int, state: RngState) -> None:
        """Put the slot's generators into ``state``."""
        self._host[slot] = _host_generator(state)
        self._local[slot] = _device_generator(state, self.device)
        self._python[slot] = state.python, state.numpy

    @property
    def begun(self) -> States | None:
        """All generators as they were when the pass began; None if it has drawn nothing."""
        return self._kept if self.drawn else None

    def now(self) -> States:
        """Copies of all generators."""
        return States(_clones(zip(self._host, self._local, strict=True)), list(self._python))

    def put(self, states: States) -> None:
        """Have all slots go on from ``states``, which stay as they are."""
        copies = _clones(states.torch)
        self._host = [host for host, _ in copies]
        self._local = [local for _, local in copies]
        self._python = list(states.python)

    def _about_to_draw(self) -> None:
        if not self.drawn:
            self.drawn = True
            self._kept = self.now()


def _clones(states: Iterable[tuple[torch.Generator, torch.Generator | None]]) -> Generators:
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
