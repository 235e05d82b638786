"""One GPU: CUDA streams and events behind the calls of a virtual device."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator

import torch

from shoal.core.profile import Direction
from shoal.core.spec import DeviceSpec
from shoal.core.turns import Upload
from shoal.device.streams import Event, Lane, ThreadStream, Turns, Work

PIECE_BYTES = 32 * 2**20  # half a millisecond of a fast link


class CudaEvent:
    """A CUDA event with timing, and the stream that waits for it."""

    __slots__ = ("_base", "_computes", "_end", "_start", "error")

    def __init__(
        self, start: torch.cuda.Event, end: torch.cuda.Event, base: _Base, computes: bool
    ) -> None:
        self._start, self._end, self._base = start, end, base
        self._computes = computes
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return bool(self._end.query())

    @property
    def startable(self) -> bool:
        return True

    @property
    def ready(self) -> bool:
        return self._computes or self.done

    def wait(self) -> None:
        self._end.synchronize()

    def order(self, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait, on the device, for this event."""
        stream.wait_event(self._end)

    def span(self) -> tuple[float, float]:
        return self._base.at(self._start), self._base.at(self._end)


CLOCK_S = 300.0
"""CUDA tells milliseconds in 24 bits: after so long in steps of 0.03 ms, after a day of 8 ms."""


class _CudaClock:
    """Unix seconds of CUDA events, by their distance from an event of the last minutes.

    The first one is synchronised; each later one is an event whose time the one before it tells.
    """

    def __init__(self) -> None:
        self._base = _Base(None, time.time())
        self._base.event.synchronize()

    def now(self) -> _Base:
        """What events that are made now are told by."""
        if time.time() - self._base.made > CLOCK_S:
            self._base = _Base(self._base, time.time())
        return self._base


class _Base:
    """An event whose time is known, or will be when somebody asks."""

    def __init__(self, before: _Base | None, made: float) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()
        self.made = made  # about
        self._before = before
        self._time = made

    def at(self, event: torch.cuda.Event) -> float:
        """The time of an event that is over, in Unix seconds."""
        before = self._before
        if before is not None:
            self.event.synchronize()
            self._time, self._before = before.at(self.event), None
        return self._time + float(self.event.elapsed_time(event)) / 1e3


class CudaStream:
    """A CUDA stream behind ``submit``; long-lived, owned by the device."""

    def __init__(
        self, stream: torch.cuda.Stream, clock: _CudaClock, *, computes: bool = False
    ) -> None:
        self.stream, self._clock, self._computes = stream, clock, computes

    def submit(
        self, work: Work, after: Iterable[Event] = (), *, seconds: float | None = None
    ) -> CudaEvent:
        """Enqueue ``work`` behind ``after``. CUDA events are waited for on the device, host
        events by the calling thread: host memory must be ready before a copy is issued.
        ``seconds`` are for emulated devices: ignored."""
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True, blocking=True)  # who waits for it sleeps
        for event in after:
            if isinstance(event, CudaEvent):
                event.order(self.stream)
            else:
                event.wait()
        with torch.cuda.stream(self.stream):
            start.record(self.stream)
            work()
            end.record(self.stream)
        return CudaEvent(start, end, self._clock.now(), self._computes)

    def so_far(self) -> CudaEvent:
        """Behind all that was enqueued until now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return CudaEvent(event, event, self._clock.now(), self._computes)

    def close(self) -> None:
        """Wait for what was enqueued; the stream itself goes back to the device's pool."""
        self.stream.synchronize()


class CudaDevice:
    """One GPU: a compute stream, pooled copy streams, and copies from pinned memory."""

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self.torch_device = torch.device(spec.torch_name)
        torch.cuda.set_device(self.torch_device)
        self._fraction = torch.cuda.get_per_process_memory_fraction(self.torch_device)
        self._keep_to_share()
        self.progress = threading.Condition()
        self.version = 0
        self.host_turns = Turns()  # a step has all the threads
        self._clock = _CudaClock()
        stream = torch.cuda.Stream(self.torch_device)
        self._compute = CudaStream(stream, self._clock, computes=True)
        self._pool: list[torch.cuda.Stream] = []

    def _keep_to_share(self) -> None:
        """Of a GPU that others work on too torch takes no more than this worker's share.

        What is cached, and what is measured beyond the budget, would be in the others' way.
        """
        if self.spec.share_bytes:
            total = torch.cuda.get_device_properties(self.torch_device).total_memory
            share = min(self._fraction, self.spec.share_bytes / total)
            torch.cuda.set_per_process_memory_fraction(share, self.torch_device)

    def close(self) -> None:
        """Give back what torch has cached; the next study may have another share.

        And what libraries keep for the compute stream: the next study has another one.
        """
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        if self.spec.share_bytes:
            torch.cuda.set_per_process_memory_fraction(self._fraction, self.torch_device)

    def lane(self) -> Lane:
        """Copy streams of their own, taken from a pool that is never freed."""
        drawn = [self._pool.pop() if self._pool else torch.cuda.Stream() for _ in range(3)]
        up, down, activations = (_PooledStream(s, self._clock, self._pool) for s in drawn)
        host = ThreadStream(f"{self.spec.name}-host", self.notify)
        return Lane(up, down, activations, host)

    def notify(self) -> None:
        """Wake whoever waits for progress."""
        with self.progress:
            self.version += 1
            self.progress.notify_all()

    def compute(
        self, work: Work, after: Iterable[Event] = (), *, seconds: float | None = None
    ) -> CudaEvent:
        """Enqueue ``work`` on the compute stream; ``seconds`` are for emulated devices."""
        return self._compute.submit(work, after)

    def so_far(self) -> CudaEvent | None:
        """Behind all that is on the compute stream now, what went past ``compute`` too.

        Memory that the allocator gives anew may be in use until then.
        """
        return self._compute.so_far()

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised bytes of device memory, allocated for the compute stream."""
        with self.active():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        direction: Direction,
        *,
        upload: Upload | None = None,
        passes: bool = False,
    ) -> None:
        """Enqueue a copy on the current stream; asynchronous from pinned memory.

        Large ones go in pieces: between two of them the copy of another stream has its turn. So
        activations pass, on a stream of their own, and the link is shared with what they pass.
        """
        if source.nbytes > PIECE_BYTES and _are_flat(target, source):
            count = PIECE_BYTES // source.element_size()
            pairs = zip(target.view(-1).split(count), source.view(-1).split(count), strict=True)
            for to, piece in pairs:
                to.copy_(piece, non_blocking=True)
            return
        target.copy_(source, non_blocking=True)

    def poison(self, region: torch.Tensor) -> None:
        """Fill bytes with NaN when this device is poisoned."""
        if self.spec.poison:
            region.fill_(0xFF)

    def synchronize(self) -> None:
        """Wait until the compute stream is empty."""
        self._compute.stream.synchronize()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make the compute stream current."""
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._compute.stream):
            yield


def _are_flat(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a part of one's memory is a part of the other's."""
    alike = target.dtype is source.dtype and target.shape == source.shape
    return alike and target.is_contiguous() and source.is_contiguous()


class _PooledStream(CudaStream):
    """A CUDA stream that returns to its pool when closed."""

    def __init__(
        self, stream: torch.cuda.Stream, clock: _CudaClock, pool: list[torch.cuda.Stream]
    ) -> None:
        super().__init__(stream, clock)
        self._pool = pool

    def close(self) -> None:
        super().close()
        self._pool.append(self.stream)
