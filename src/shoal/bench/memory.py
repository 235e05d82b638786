"""The host's memory: how fast it is copied, summed, and stepped by AdamW."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from shoal.bench.measured import HostMemory, HostOptimizer, Rate
from shoal.bench.timing import Work, host_timer, repeat, threads
from shoal.core.seams import Clock

FLOAT_BYTES = 4


def measure_host(array_bytes: int, cores: int, budget_s: float, clock: Clock) -> HostMemory:
    """STREAM's copy and triad over arrays of ``array_bytes``; a third array is the result."""
    first, second, third = (torch.full((array_bytes // FLOAT_BYTES,), 1.0) for _ in range(3))

    def copy() -> Tensor:
        return third.copy_(first)

    def triad() -> Tensor:
        return torch.add(first, second, alpha=3.0, out=third)

    rates = {}
    for name, work, arrays in (("copy", copy, 2), ("triad", triad, 3)):
        for suffix, count in (("one", 1), ("all", cores)):
            seconds = _seconds(work, count, budget_s / 4, clock)
            rates[f"{name}_{suffix}"] = Rate.of(arrays * first.nbytes, seconds)
    return HostMemory(**rates)


def measure_adamw(
    parameters: int, chunk: int, cores: int, budget_s: float, clock: Clock
) -> HostOptimizer:
    """One AdamW step over a flat tensor of ``parameters``, in chunks of ``chunk``.

    As a host step is done: float32, torch's fused kernel, one optimizer, each chunk a
    parameter that is a view of the flat tensor.
    """
    flat, grads = (torch.full((parameters,), 0.1) for _ in range(2))
    chunks = []
    for part, grad in zip(flat.split(chunk), grads.split(chunk), strict=True):
        chunks.append(torch.nn.Parameter(part))
        chunks[-1].grad = grad
    step: Work = torch.optim.AdamW(chunks, lr=1e-4, fused=True).step
    one = _seconds(step, 1, budget_s / 2, clock)
    every = _seconds(step, cores, budget_s / 2, clock)
    return HostOptimizer(one=Rate.of(parameters, one), all=Rate.of(parameters, every))


def _seconds(work: Work, count: int, budget_s: float, clock: Clock) -> list[float]:
    with threads(count):
        return repeat(functools.partial(host_timer(clock), work), budget_s, clock)
