"""A trial's stay on a device: its seat, and how far its current lease is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.core.technique import Technique, kept_heads, kept_shards, kept_weights
from shoal.runtime.interpret import Seat
from shoal.runtime.messages import LeaseOver
from shoal.runtime.session import Task


@dataclass(slots=True)
class Stay:
    """A seat and how far its current lease is."""

    seat: Seat
    tasks: Iterator[Task]
    task: Task | None = None
    has_computed: bool = False  # since it came
    leaving: bool = False  # its tasks are through
    departing: bool = False  # what stayed on the device is on its way to the host
    over: LeaseOver | None = None  # everything is there; what to say of it
    step_began: float = field(default_factory=time.perf_counter)


def here(technique: Technique) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shards that stay on the device between steps, whose parameters alone do, or some tensors."""
    return kept_shards(technique), kept_weights(technique), kept_heads(technique)
