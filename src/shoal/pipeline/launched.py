"""Stages that were started by somebody else, as by ``torchrun``: a rank for each.

    torchrun --nproc-per-node 4 train.py      # which calls run_stages(..., stages=4)

Every rank calls ``run_stages`` with the same arguments, on one machine or on several, and gets
what all of them trained. Who started the ranks looks after them: one that fails ends the others.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from shoal.core.errors import SpecError
from shoal.pipeline.processes import SETUP_S
from shoal.rng import capture_rng, restore_rng

BACKEND = "gloo"
"""Boundaries go through host memory: nothing here has run on NCCL."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Where a stage runs; nobody is told how far it is."""

    rank: int
    world: int

    def begin(self, actions: list[str]) -> None:
        """Nothing: whoever waits for this rank sees that it does not answer."""

    def watch(self, index: int, waits: bool) -> None:
        """Nothing, likewise."""


def is_launched() -> bool:
    """Whether this process is one of several that were started to train together."""
    return dist.is_initialized() or dist.is_torchelastic_launched()


def run_launched(function: Callable[[Rank], Any], world: int, *, hang_s: float) -> list[Any]:
    """Run ``function`` on this rank; what each of them returned, by rank, on all of them.

    This process's threads and random streams are as before at the end.

    Raises:
        SpecError: there are not ``world`` ranks, or their group is none of gloo's.
    """
    with _group(hang_s), _untouched():
        _require(world)
        rank = dist.get_rank()
        mine = cloudpickle.dumps(function(Rank(rank, world)))
        found: list[Any] = [None] * world
        dist.all_gather_object(found, mine)
        return [cloudpickle.loads(data) for data in found]


@contextmanager
def _group(hang_s: float) -> Iterator[None]:
    """The process group that is there, or one that ends again."""
    if dist.is_initialized():
        yield
        return
    limit = datetime.timedelta(seconds=max(hang_s, SETUP_S))
    dist.init_process_group(BACKEND, timeout=limit)
    yield  # after an error the others may never meet: whoever started the ranks ends them
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _untouched() -> Iterator[None]:
    threads, streams = torch.get_num_threads(), capture_rng()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        restore_rng(streams)


def _require(world: int) -> None:
    if dist.get_world_size() != world:
        raise SpecError(
            f"the pipeline takes {world} processes, one for each stage of each copy, and "
            f"{dist.get_world_size()} were started. Use torchrun --nproc-per-node {world}, or "
            "another number of stages."
        )
    if dist.get_backend() != BACKEND:
        raise SpecError(
            f"the process group that is there uses {dist.get_backend()!r}; stages send their "
            f"messages with {BACKEND!r}. Leave init_process_group out, or ask it for that."
        )
