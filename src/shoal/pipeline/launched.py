"""Stages that were started by somebody else, as by ``torchrun``: a rank for each.

    torchrun --nproc-per-node 4 train.py      # which calls run_stages(..., stages=4)

Every rank calls ``run_stages`` with the same arguments, on one machine or on several, and gets
what all of them trained. Who started the ranks looks after them: one that fails ends the others.
A group that is there may be gloo's or NCCL's, or both: what the ranks say each other through the
host goes over gloo, in a group of its own where the one that is there is another's.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from shoal.core.errors import SpecError
from shoal.pipeline.meeting import DeviceKind
from shoal.pipeline.processes import SETUP_S
from shoal.rng import capture_rng, restore_rng

GLOO, NCCL = "gloo", "nccl"


@dataclass(frozen=True, slots=True)
class Rank:
    """Where a stage runs; nobody is told how far it is.

    ``local`` is its number on its machine, ``host`` a group of gloo's, None for the default one.
    """

    rank: int
    world: int
    local: int = 0
    host: dist.ProcessGroup | None = None

    def begin(self, actions: list[str]) -> None:
        """Nothing: whoever waits for this rank sees that it does not answer."""

    def watch(self, index: int, waits: bool) -> None:
        """Nothing, likewise."""


def is_launched() -> bool:
    """Whether this process is one of several that were started to train together."""
    return dist.is_initialized() or dist.is_torchelastic_launched()


def device_of_group() -> DeviceKind:
    """Where ranks compute unless it is said: on GPUs if the group has none but them."""
    return "cuda" if dist.is_initialized() and _backends().keys() == {"cuda"} else "cpu"


def run_launched(function: Callable[[Rank], Any], world: int, *, hang_s: float) -> list[Any]:
    """Run ``function`` on this rank; what each of them returned, by rank, on all of them.

    This process's threads and random streams are as before at the end.

    Raises:
        SpecError: there are not ``world`` ranks, or their group is neither gloo's nor NCCL's.
    """
    with _group(hang_s), _untouched():
        _require(world)
        with _host_group(hang_s) as host:
            rank = Rank(dist.get_rank(), world, _local(), host)
            mine = cloudpickle.dumps(function(rank))
            found: list[Any] = [None] * world
            dist.all_gather_object(found, mine, group=host)
        return [cloudpickle.loads(data) for data in found]


def _local() -> int:
    """This rank's number on its machine."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return torch.cuda.current_device() if torch.cuda.is_available() else dist.get_rank()


@contextmanager
def _host_group(hang_s: float) -> Iterator[dist.ProcessGroup | None]:
    """A group of gloo's: None for the default one, or one that ends again."""
    if set(_backends().values()) == {GLOO}:
        yield None
        return
    limit = datetime.timedelta(seconds=max(hang_s, SETUP_S))
    host = dist.new_group(backend=GLOO, timeout=limit)
    yield host
    dist.barrier(group=host)
    dist.destroy_process_group(host)


@contextmanager
def _group(hang_s: float) -> Iterator[None]:
    """The process group that is there, or one that ends again."""
    if dist.is_initialized():
        yield
        return
    limit = datetime.timedelta(seconds=max(hang_s, SETUP_S))
    dist.init_process_group(GLOO, timeout=limit)
    yield  # after an error the others may never meet: whoever started the ranks ends them
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _untouched() -> Iterator[None]:
    threads, streams = torch.get_num_threads(), capture_rng()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        restore_rng(streams)
        if on_gpus is not None:  # a rank's is not always the current one
            torch.cuda.set_rng_state_all(on_gpus)


def _require(world: int) -> None:
    if dist.get_world_size() != world:
        raise SpecError(
            f"the pipeline takes {world} processes, one for each stage of each copy, and "
            f"{dist.get_world_size()} were started. Use torchrun --nproc-per-node {world}, or "
            "another number of stages."
        )
    others = set(_backends().values()) - {GLOO, NCCL}
    if others:
        raise SpecError(
            f"the process group that is there uses {min(others)!r}; stages send their messages "
            f"with {GLOO!r} and {NCCL!r}. Leave init_process_group out, or ask it for one of them."
        )


def _backends() -> dict[str, str]:
    """The default group's backend for each kind of device that it has one for."""
    pairs = (pair.split(":") for pair in dist.get_backend_config().split(","))
    return {device: backend for device, backend in pairs}
