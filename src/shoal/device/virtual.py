"""A CPU worker that behaves like a device, at the speed of this machine."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator

import torch

from shoal.core.profile import Direction
from shoal.core.spec import DeviceSpec
from shoal.device.streams import Event, Lane, Ran, ThreadStream, Turns, Work


class VirtualDevice:
    """A CPU worker that behaves like a device: copies on threads, links with a speed.

    With ``poison`` every slot is filled with NaN before a load and every copy is delayed
    at random, so that a read before its load, or a load over something still in use, is
    seen in the results.

    Attributes:
        host_turns: Whose optimizer step runs on the host: as many at a time as there are cores
            for their threads.
    """

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self.torch_device = torch.device("cpu")
        self.progress = threading.Condition()
        self.version = 0
        self._links: dict[Direction, threading.Lock]
        self._links = {"up": threading.Lock(), "down": threading.Lock()}
        self.host_turns = Turns(max(1, (os.cpu_count() or 1) // spec.threads))
        self._random = random.Random(spec.name)
        self.last_compute: Event | None = None  # nothing is: compute is over when it returns

    def lane(self) -> Lane:
        """New copy and host streams."""
        names = (f"{self.spec.name}-{stream}" for stream in ("up", "down", "host"))
        up, down, host = (ThreadStream(name, self.notify) for name in names)
        return Lane(up, down, host)

    def notify(self) -> None:
        """Wake whoever waits for progress."""
        with self.progress:
            self.version += 1
            self.progress.notify_all()

    def compute(
        self, work: Work, after: Iterable[Event] = (), *, seconds: float | None = None
    ) -> Ran:
        """Run ``work`` on the compute stream: here, in the calling thread.

        ``seconds`` is how long it shall take where the device is emulated; else ignored.
        """
        for event in after:
            event.wait()
        return Ran(work)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised bytes of device memory, 64-byte aligned."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor, direction: Direction) -> None:
        """Copy inside a stream; ``direction`` is "up" or "down". Takes the link's time."""
        if self.spec.poison:
            time.sleep(self._random.uniform(0, 2e-3))
        speed = self.spec.link_bytes_per_s
        if speed is None:
            target.copy_(source)
            return
        with self._links[direction]:
            begin = time.perf_counter()
            target.copy_(source)
            left = source.numel() * source.element_size() / speed - time.perf_counter() + begin
            if left > 0:
                time.sleep(left)

    def poison(self, region: torch.Tensor) -> None:
        """Fill bytes with NaN when this device is poisoned."""
        if self.spec.poison:
            region.fill_(0xFF)

    def synchronize(self) -> None:
        """Wait until compute is done: nothing to do, it ran in the calling thread."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The context in which compute is submitted."""
        yield
