"""The link between host and device: up, down, and both at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shoal.bench.measured import Link, Rate
from shoal.bench.timing import repeat, threads
from shoal.core.profile import Direction
from shoal.core.seams import Clock
from shoal.core.spec import DeviceSpec
from shoal.core.units import Bytes
from shoal.device import VirtualDevice

_COPIES = 4  # of one buffer between two CUDA events

Copies = Callable[[tuple[Direction, ...]], float]
"""Copies one buffer in each direction given, at once; the seconds that took."""


def measure_link(copies: Copies, num_bytes: int, budget_s: float, clock: Clock) -> Link:
    """``copies`` moves ``num_bytes`` in each direction."""

    def rate(*directions: Direction) -> Rate:
        seconds = repeat(lambda: copies(directions), budget_s / 3, clock)
        return Rate.of(num_bytes * len(directions), seconds)

    return Link(up=rate("up"), down=rate("down"), both=rate("up", "down"))


_GLANCE_S = 0.03


def glance(spec: DeviceSpec, device: torch.device, clock: Clock) -> Link | None:
    """A quick look at a device's link, to see whether it is what it is said to be.

    None where the link is not this machine's: emulated, or of a speed that was given; and where
    there is no memory to copy to.
    """
    if spec.profile is not None or spec.link_bytes_per_s is not None:
        return None
    on_gpu = spec.kind == "cuda"
    num_bytes = (32 if on_gpu else 4) * 2**20
    try:
        with cuda_copies(device, num_bytes) if on_gpu else virtual_copies(num_bytes) as copies:
            return measure_link(copies, num_bytes, _GLANCE_S, clock)
    except torch.OutOfMemoryError:
        return None


@contextlib.contextmanager
def virtual_copies(num_bytes: int) -> Iterator[Copies]:
    """The copy threads of a virtual device, each with one core as in a worker."""
    device = VirtualDevice(DeviceSpec(name="cpu:0", kind="virtual", memory=Bytes(num_bytes)))
    pairs = {direction: _buffers(num_bytes) for direction in ("up", "down")}

    def copies(directions: tuple[Direction, ...]) -> float:
        events = [
            getattr(lane, way).submit(lambda way=way: device.copy(*pairs[way], way))
            for way in directions
        ]
        for event in events:
            event.wait()
        spans = [event.span() for event in events]
        return float(max(end for _, end in spans) - min(start for start, _ in spans))

    with threads(1):  # before the copy threads begin: they take it over
        lane = device.lane()
        try:
            yield copies
        finally:
            lane.close()


def _buffers(num_bytes: int) -> tuple[Tensor, Tensor]:
    """A target and a source whose pages are there."""
    return tuple(torch.full((num_bytes,), fill, dtype=torch.uint8) for fill in (0, 1))  # type: ignore[return-value]


@contextlib.contextmanager
def cuda_copies(device: torch.device, num_bytes: int) -> Iterator[Copies]:
    """Copies between pinned memory and a GPU on two streams, timed by the GPU's events."""
    with torch.cuda.device(device):
        pinned = {way: _pinned(num_bytes) for way in ("up", "down")}
        there = {way: torch.zeros(num_bytes, dtype=torch.uint8, device=device) for way in pinned}
        streams = {way: torch.cuda.Stream(device) for way in pinned}
    torch.cuda.synchronize(device)

    def copies(directions: tuple[Direction, ...]) -> float:
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            return _timed_copies(directions, pinned, there, streams)

    try:
        yield copies
    finally:
        torch.cuda.synchronize(device)


def _timed_copies(
    directions: tuple[Direction, ...],
    pinned: dict[str, Tensor],
    there: dict[str, Tensor],
    streams: dict[str, torch.cuda.Stream],
) -> float:
    """Seconds of one copy each way, while those of the other way run.

    Both streams wait for one event, so that they begin together; each has one of its own
    at its end, and the later one counts.
    """
    begin = torch.cuda.Event(enable_timing=True)
    ends = {way: torch.cuda.Event(enable_timing=True) for way in directions}
    begin.record(streams[directions[0]])
    for way in directions:
        streams[way].wait_event(begin)
    for _ in range(_COPIES):
        for way in directions:
            target, source = there[way], pinned[way]
            if way == "down":
                target, source = source, target
            with torch.cuda.stream(streams[way]):
                target.copy_(source, non_blocking=True)
    for way, end in ends.items():
        end.record(streams[way])
    for end in ends.values():
        end.synchronize()
    return max(float(begin.elapsed_time(end)) for end in ends.values()) / 1e3 / _COPIES


def _pinned(num_bytes: int) -> Tensor:
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    if not tensor.is_pinned():  # a silent half of the speed
        raise RuntimeError("torch gave pageable memory where pinned memory was asked for")
    return tensor
