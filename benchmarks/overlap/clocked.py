"""Clocks for the streams of the stand-in for CUDA (tests/standin), which itself runs all at once.

[Note: a clock for each stream]
What is submitted runs at once, so that memory and bits are right; when it would begin and end on a
GPU is worked out: behind what is on its stream and the events that it waits for, a unit as long as
it is said to last, a copy as long as its bytes take. Whoever asks an event is told by that clock,
and whoever waits for one sleeps. The code that decides what is submitted when is shoal's own, and
takes the time that it takes here; ``slower`` makes the GPU so many times slower, so that it counts
for as little as beside a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from shoal.device import cuda, losses
from shoal.program.ir import Action, Op
from shoal.runtime import interpret


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Seconds and bytes a second of a GPU, and how many times slower it shall be."""

    forward_s: float  # of a shard but for the first and the last, which take nothing
    backward_s: float
    host_step_s: float  # of a shard, on the host
    link: float  # each way
    slower: float

    def unit_s(self, action: Action, shards: int) -> float:
        if action.op not in (Op.F, Op.B) or action.shard in (0, shards - 1):
            return 0.0
        return self.forward_s if action.op is Op.F else self.backward_s


class Clocked(cuda.CudaEvent):
    """An event that is over at a time that is known when it is made."""

    __slots__ = ("ends", "starts")

    def __init__(self, starts: float, ends: float, computes: bool) -> None:
        self.starts, self.ends, self._computes = starts, ends, computes
        self.error = None

    @property
    def done(self) -> bool:
        return time.time() >= self.ends

    def wait(self) -> None:
        time.sleep(max(0.0, self.ends - time.time()))

    def span(self) -> tuple[float, float]:
        return self.starts, self.ends


_now = threading.local()  # what is submitted by this thread: its seconds, or the bytes it copies
_free: dict[int, float] = {}  # stream -> when it has nothing to do


def install(clock: Clock) -> None:
    """In this process, from now on."""
    if getattr(cuda.CudaStream.submit, "clocked", False):
        return
    real_copy, real_compute = cuda.CudaDevice.copy, interpret.Seat._run_compute
    real_piece = interpret.Seat._step_piece

    def submit(self: Any, work: Any, after: Iterable[Any] = (), **_: Any) -> Clocked:
        starts = _free.get(id(self), 0.0)
        for event in after:
            if isinstance(event, Clocked):
                starts = max(starts, event.ends)
            else:
                event.wait()
        starts = max(starts, time.time())
        _now.copied, _now.at = 0, self
        seconds = getattr(_now, "unit_s", 0.0) if self._computes else 0.0
        _free[id(self)] = starts + clock.slower * seconds  # a loss is told by when its unit ends
        with torch.cuda.stream(self.stream):
            work()
        if not self._computes:
            seconds = _now.copied / clock.link
        _free[id(self)] = ends = starts + clock.slower * seconds
        return Clocked(starts, ends, self._computes)

    def so_far(self: Any) -> Clocked:
        free = _free.get(id(self), 0.0)
        return Clocked(free, free, self._computes)

    def rest(stream: Any) -> None:
        time.sleep(max(0.0, _free.get(id(stream), 0.0) - time.time()))

    def copy(self: Any, target: Any, source: Any, *args: Any, **how: Any) -> None:
        _now.copied = getattr(_now, "copied", 0) + source.nbytes
        real_copy(self, target, source, *args, **how)

    def run_compute(self: Any, task: Any, action: Action, after: Any) -> Any:
        _now.unit_s = clock.unit_s(action, len(self.session.layout.shards))
        return real_compute(self, task, action, after)

    def step_piece(self: Any, step: Any) -> None:
        began = time.time()
        real_piece(self, step)  # a small shard's step is one piece
        time.sleep(max(0.0, clock.slower * clock.host_step_s - (time.time() - began)))

    submit.clocked = True  # type: ignore[attr-defined]
    cuda.CudaStream.submit, cuda.CudaStream.so_far = submit, so_far  # type: ignore[assignment]
    cuda.CudaStream.close = rest  # type: ignore[method-assign]
    cuda.CudaDevice.copy = copy  # type: ignore[method-assign]
    cuda.CudaDevice.synchronize = lambda self: rest(self._compute)  # type: ignore[method-assign]
    interpret.Seat._run_compute = run_compute  # type: ignore[method-assign]
    interpret.Seat._step_piece = step_piece  # type: ignore[method-assign]
    losses.CudaArrival.record = _arrives  # type: ignore[method-assign]
    losses.CudaArrival.synchronize = _arrived  # type: ignore[method-assign]


def _arrives(self: Any) -> None:
    self.ends = _free.get(id(_now.at), 0.0)


def _arrived(self: Any) -> None:
    time.sleep(max(0.0, self.ends - time.time()))
