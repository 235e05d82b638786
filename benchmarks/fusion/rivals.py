"""What a user would run instead of an array: loops, one after another or in two processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import nn
from workloads import WORKLOADS, Workload, loss

Step = Callable[[], None]
SPAWN = multiprocessing.get_context("spawn")


class Cost(NamedTuple):
    """Seconds of one step of all models."""

    cpu_s: float
    wall_s: float

    def times(self, models: int) -> Cost:
        """Of so many models, one after another, from one model's."""
        return Cost(self.cpu_s * models, self.wall_s * models)


def cost(step: Step, repeats: int) -> Cost:
    _wait()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        step()
    _wait()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Cost(cpu / repeats, wall / repeats)


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def models(workload: Workload, slots: range, device: str = "cpu") -> list[nn.Module]:
    made = []
    for seed in slots:
        torch.manual_seed(seed)
        with torch.device(device):
            found = workload.model({})
        one = nn.ModuleDict(found) if workload.step else found
        made.append(one.to(device))
    return made


def batches(workload: Workload, slots: range, device: str = "cpu") -> list[Any]:
    made = [workload.batch(torch.Generator().manual_seed(seed)) for seed in slots]
    return [tuple(tensor.to(device) for tensor in batch) for batch in made]


def rate(slot: int) -> float:
    return 1e-4 * (1 + slot)


def serial_step(
    workload: Workload,
    slots: range,
    device: str = "cpu",
    *,
    compiled: bool = False,
    **options: Any,
) -> Step:
    """One step of each model in turn: the loop anyone would write, reading every loss."""
    made, data = models(workload, slots, device), batches(workload, slots, device)
    lone = several_step if workload.step else one_step
    steps = [
        lone(workload, model, batch, compiled=compiled, lr=rate(slot), **options)
        for slot, model, batch in zip(slots, made, data, strict=True)
    ]

    def step() -> None:
        for each in steps:
            each()

    return step


def one_step(
    workload: Workload, model: nn.Module, batch: Any, *, compiled: bool, **options: Any
) -> Step:
    """A step of one model."""
    call: Any = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), **options)

    def step() -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        value = loss(call(batch[0]), batch)
        value.backward()
        optimizer.step()
        value.item()

    return step


def several_step(
    workload: Workload, models: Any, batch: Any, *, compiled: bool, **options: Any
) -> Step:
    """The workload's own step of several models."""
    own = workload.step
    assert own is not None
    calls: dict[str, Any] = {
        name: torch.compile(model, dynamic=False) if compiled else model
        for name, model in models.items()
    }
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), **options) for name, model in models.items()
    }

    def step() -> None:
        models.train()
        for value in own(calls, batch, optimizers, {}).values():
            value.item()

    return step


def started(
    serve: Callable[..., None], *args: Any, environment: Mapping[str, str] = os.environ
) -> Connection:
    """Our end of a pipe to a new process, which serves the other one in that environment."""
    ours, theirs = SPAWN.Pipe()
    here = dict(os.environ)
    os.environ.update(environment)
    try:
        SPAWN.Process(target=serve, args=(theirs, *args), daemon=True).start()
    finally:
        os.environ.clear()
        os.environ.update(here)
    return ours


class Processes:
    """The serial loop in processes, each with its share of the models and a thread of its own.

    They stay for workload after workload, so that each opens its GPU once.
    """

    def __init__(self, count: int = 2, device: str = "cpu") -> None:
        self._pipes = [started(_serve, device) for _ in range(count)]

    def take(self, name: str, width: int) -> None:
        """From now on these models, or with no name none; what was there before is freed."""
        shares, count = [], len(self._pipes)
        for number in range(count):
            shares.append(range(number * width // count, (number + 1) * width // count))
        self._ask([(name, share) for share in shares])

    def cost(self, repeats: int) -> Cost:
        """Of all of them: seconds of every core's time, and until the last is through."""
        found = self._ask([repeats] * len(self._pipes))
        return Cost(sum(one.cpu_s for one in found), max(one.wall_s for one in found))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)

    def _ask(self, words: list[Any]) -> list[Any]:
        for pipe, word in zip(self._pipes, words, strict=True):
            pipe.send(word)
        return [pipe.recv() for pipe in self._pipes]


def _serve(pipe: Connection, device: str) -> None:
    torch.set_num_threads(1)
    step: Step = lambda: None  # noqa: E731
    while (word := pipe.recv()) is not None:
        if isinstance(word, int):
            pipe.send(cost(step, word))
            continue
        name, slots = word
        step = lambda: None  # noqa: E731  # the memory of the ones before is given back
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
        if name:
            step = serial_step(WORKLOADS[name], slots, device, fused=True)
            step()
        pipe.send(None)
