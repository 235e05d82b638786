"""How long a piece of work takes: again and again, for as long as there is time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from shoal.core.seams import Clock

LEAST = 3  # runs that count, unless one alone takes longer than there is time
MOST = 1000
_BATCH = 8  # kernels between two CUDA events, so that launching them is not what is timed

Work = Callable[[], object]
Timer = Callable[[Work], float]
"""Runs a piece of work and says how many seconds it took, on whatever device it ran."""


def repeat(work: Callable[[], float], budget_s: float, clock: Clock) -> list[float]:
    """What ``work`` says each time; the first run, which only warms up, is left out.

    Runs until ``budget_s`` are over, at least ``LEAST`` times; once, if that takes longer.
    """
    begin = clock.now()
    work()
    results: list[float] = []
    while len(results) < MOST:
        results.append(work())
        spent = clock.now() - begin
        if spent >= budget_s and (len(results) >= LEAST or spent >= LEAST * budget_s):
            break
    return results


def host_timer(clock: Clock) -> Timer:
    """Times work that is over when its call returns."""

    def seconds(work: Work) -> float:
        begin = clock.now()
        work()
        return clock.now() - begin

    return seconds


def cuda_timer(device: torch.device) -> Timer:
    """Times kernels on the current stream of a GPU, by its own events."""

    def seconds(work: Work) -> float:
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(_BATCH):
                work()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / _BATCH

    return seconds


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Have torch's kernels run on ``count`` threads, also those of threads begun meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
