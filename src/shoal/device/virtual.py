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
from shoal.core.turns import Upload
from shoal.device.pace import Wire
from shoal.device.streams import Event, Lane, Ran, ThreadStream, Turns, Work

STREAMS = ("up", "down", "activations", "host")  # of a lane


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
        self._wires: dict[Direction, Wire] = {"up": Wire(), "down": Wire()}
        self.host_turns = Turns(max(1, (os.cpu_count() or 1) // spec.threads))
        self._random = random.Random(spec.name)

    def lane(self) -> Lane:
        """New copy and host streams."""
        return Lane(*(self._stream(f"{self.spec.name}-{name}") for name in STREAMS))

    def _stream(self, name: str) -> ThreadStream:
        return ThreadStream(name, self.notify)

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

    def so_far(self) -> Event | None:
        """What compute is at: nothing, for it is over when it returns."""
        return None

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised bytes of device memory, 64-byte aligned."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        direction: Direction,
        *,
        upload: Upload | None = None,
        passes: bool = False,
    ) -> None:
        """Copy inside a stream; ``direction`` is "up" or "down". Takes the link's time.

        What ``passes`` does not wait for another's ``upload`` that it may pass: that one takes as
        much longer.
        """
        if self.spec.poison:
            time.sleep(self._random.uniform(0, 2e-3))
        speed = self.spec.link_bytes_per_s
        if speed is None:
            target.copy_(source)
            return
        wire, began = self._wires[direction], time.perf_counter()
        target.copy_(source)
        seconds = source.nbytes / speed
        if passes and upload and (span := wire.pass_by(began, seconds, upload)):
            _sleep_until(span[1])
            return
        with wire.carry(began, None if passes else upload) as at:
            at += seconds
            _sleep_until(at)
            while not wire.leave(at):
                at += wire.passed()
                _sleep_until(at)

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


def _sleep_until(at: float) -> None:
    left_s = at - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
