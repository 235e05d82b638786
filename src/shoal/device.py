"""Streams, events and memory of one device: the same calls on CUDA and on a virtual device.

[Note: streams]
A device has one compute stream, and per lane (a trial that is leased to it) an ``up``, a
``down`` and a ``host`` stream. Work is submitted in order; work on a stream starts when
everything before it on that stream is done and every event in ``after`` is complete.

    virtual device   compute is the calling thread; the others are one thread each;
                     an event is complete when the work has run
    CUDA             compute, up and down are CUDA streams that wait for events on the
                     device; host is a thread

``Event.startable`` is what the scheduler asks before it submits compute: on a virtual device
that the event is complete (else the calling thread would sleep while another trial
could run), on CUDA always, since the stream itself waits.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from shoal.core.errors import SpecError
from shoal.core.spec import DeviceSpec

Work = Callable[[], Any]


class Event(Protocol):
    """The completion of one piece of submitted work."""

    error: BaseException | None

    @property
    def done(self) -> bool:
        """Whether the work has completed."""

    @property
    def startable(self) -> bool:
        """Whether work that needs this event may be submitted without blocking the caller."""

    def wait(self) -> None:
        """Block the calling thread until the work is complete; raise its error if it failed."""

    def span(self) -> tuple[float, float]:
        """Unix seconds of the work's start and end; only once it is done."""


class ThreadEvent:
    """An event that a thread sets."""

    __slots__ = ("_flag", "end", "error", "start")

    def __init__(self) -> None:
        self._flag = threading.Event()
        self.error: BaseException | None = None
        self.start = self.end = 0.0

    @property
    def done(self) -> bool:
        return self._flag.is_set()

    startable = done

    def run(self, work: Work) -> None:
        """Run ``work`` now, keep its times and its error, and complete."""
        self.start = time.time()
        try:
            work()
        except BaseException as error:
            self.error = error
        self.end = time.time()
        self._flag.set()

    def wait(self) -> None:
        self._flag.wait()
        if self.error is not None:
            raise self.error

    def span(self) -> tuple[float, float]:
        return self.start, self.end


class Ran:
    """The event of work that ran in the calling thread: complete when it is made."""

    __slots__ = ("end", "error", "start")
    done = startable = True

    def __init__(self, work: Work) -> None:
        self.error: BaseException | None = None
        self.start = time.time()
        try:
            work()
        except BaseException as error:
            self.error = error
        self.end = time.time()

    def wait(self) -> None:
        if self.error is not None:
            raise self.error

    def span(self) -> tuple[float, float]:
        return self.start, self.end


class ThreadStream:
    """Work in order on a thread of its own. Use as a context manager or call ``close``."""

    def __init__(self, name: str, notify: Work) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, tuple[Event, ...], ThreadEvent] | None]
        self._queue = queue.SimpleQueue()
        self._notify = notify
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work, after: Iterable[Event] = ()) -> ThreadEvent:
        """Queue ``work``; it runs when all of ``after`` are complete. A failed one fails it."""
        event = ThreadEvent()
        self._queue.put((work, tuple(after), event))
        return event

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, after, event = item
            try:
                for needed in after:
                    needed.wait()
            except BaseException as error:
                event.run(_raiser(error))
            else:
                event.run(work)
            del item, work, after  # tensors in the closures are free now, not at the next item
            self._notify()


def _raiser(error: BaseException) -> Work:
    def work() -> None:
        raise error

    return work


class Lane:
    """The copy and host streams of one trial on a device."""

    def __init__(self, up: Any, down: Any, host: ThreadStream) -> None:
        self.up, self.down, self.host = up, down, host

    def close(self) -> None:
        for stream in (self.up, self.down, self.host):
            stream.close()


class VirtualDevice:
    """A CPU worker that behaves like a device: copies on threads, links with a speed.

    With ``poison`` every slot is filled with NaN before a load and every copy is delayed
    at random, so that a read before its load, or a load over something still in use, is
    seen in the results.
    """

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self.torch_device = torch.device("cpu")
        self.progress = threading.Condition()
        self.version = 0
        self._links = {"up": threading.Lock(), "down": threading.Lock()}
        self._random = random.Random(spec.name)

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

    def compute(self, work: Work, after: Iterable[Event] = ()) -> Ran:
        """Run ``work`` on the compute stream: here, in the calling thread."""
        for event in after:
            event.wait()
        return Ran(work)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised bytes of device memory, 64-byte aligned."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor, direction: str) -> None:
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


class CudaEvent:
    """A CUDA event with timing, and the stream that waits for it."""

    __slots__ = ("_base", "_end", "_start", "error")

    def __init__(self, start: torch.cuda.Event, end: torch.cuda.Event, base: _CudaClock) -> None:
        self._start, self._end, self._base = start, end, base
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return bool(self._end.query())

    @property
    def startable(self) -> bool:
        return True

    def wait(self) -> None:
        self._end.synchronize()

    def order(self, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait, on the device, for this event."""
        stream.wait_event(self._end)

    def span(self) -> tuple[float, float]:
        return self._base.at(self._start), self._base.at(self._end)


class _CudaClock:
    """Unix seconds of CUDA events, by their distance from one synchronised event."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()
        self._event.synchronize()
        self._time = time.time()

    def at(self, event: torch.cuda.Event) -> float:
        return self._time + float(self._event.elapsed_time(event)) / 1e3


class CudaStream:
    """A CUDA stream behind ``submit``; long-lived, owned by the device."""

    def __init__(self, stream: torch.cuda.Stream, clock: _CudaClock) -> None:
        self.stream, self._clock = stream, clock

    def submit(self, work: Work, after: Iterable[Event] = ()) -> CudaEvent:
        """Enqueue ``work`` behind ``after``. CUDA events are waited for on the device, host
        events by the calling thread: host memory must be ready before a copy is issued."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for event in after:
            if isinstance(event, CudaEvent):
                event.order(self.stream)
            else:
                event.wait()
        with torch.cuda.stream(self.stream):
            start.record(self.stream)
            work()
            end.record(self.stream)
        return CudaEvent(start, end, self._clock)

    def close(self) -> None:
        """Wait for what was enqueued; the stream itself goes back to the device's pool."""
        self.stream.synchronize()


class CudaDevice:
    """One GPU: a compute stream, pooled copy streams, and copies from pinned memory."""

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self.torch_device = torch.device(spec.name)
        torch.cuda.set_device(self.torch_device)
        self.progress = threading.Condition()
        self.version = 0
        self._clock = _CudaClock()
        self._compute = CudaStream(torch.cuda.Stream(self.torch_device), self._clock)
        self._pool: list[torch.cuda.Stream] = []

    def lane(self) -> Lane:
        """Copy streams of their own, taken from a pool that is never freed."""
        pair = [self._pool.pop() if self._pool else torch.cuda.Stream() for _ in range(2)]
        up, down = (_PooledStream(stream, self._clock, self._pool) for stream in pair)
        return Lane(up, down, ThreadStream(f"{self.spec.name}-host", self.notify))

    def notify(self) -> None:
        """Wake whoever waits for progress."""
        with self.progress:
            self.version += 1
            self.progress.notify_all()

    def compute(self, work: Work, after: Iterable[Event] = ()) -> CudaEvent:
        """Enqueue ``work`` on the compute stream."""
        return self._compute.submit(work, after)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised bytes of device memory, allocated for the compute stream."""
        with self.active():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, direction: str) -> None:
        """Enqueue a copy on the current stream; asynchronous from pinned memory."""
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


Device = VirtualDevice | CudaDevice


def open_device(spec: DeviceSpec) -> Device:
    """The device of a description.

    Raises:
        SpecError: a GPU was asked for and torch sees none.
    """
    if spec.kind == "virtual":
        return VirtualDevice(spec)
    if not torch.cuda.is_available():
        raise SpecError(
            f"device {spec.name} was asked for, but torch {torch.__version__} sees no GPU. "
            "Install a CUDA build of torch, or use --devices cpu:2."
        )
    return CudaDevice(spec)
