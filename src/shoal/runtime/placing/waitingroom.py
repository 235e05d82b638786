"""Host memory for what waits there between forward and backward: taken before the first step.

[Note: no pinning inside a step]
How much waits is planned to the byte, so one piece of memory is taken, and registered with CUDA,
when a lease begins. Each shard's input of each micro-batch, and what each shard's forward saved,
has its place there, as large as was measured. Only a larger batch gets memory of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from torch import Tensor

from shoal.core.plan import Job
from shoal.core.technique import Spilled
from shoal.memory.stacking import ROWS_APART
from shoal.memory.store import Staging
from shoal.spill import generate

ALIGNED = 64
"""Places begin at multiples of so many bytes, so that any type may be viewed there."""
WIRES = 8
"""Tensors that enter a shard; for more of them there may be no room between them."""


class WaitingRoom:
    """Places by key; the caller's while the room is open.

    Args:
        sizes: Bytes of each place, as planned.

    Raises:
        CapacityError: the host has not that much memory.
    """

    def __init__(self, sizes: Mapping[Hashable, int], *, pin: bool) -> None:
        self._pin = pin
        self._places: dict[Hashable, tuple[int, int]] = {}
        end = 0
        for key, size in sizes.items():
            self._places[key] = (end, size)
            end += aligned(size)
        self._room = Staging(end, pin=pin) if end else None
        self._own: dict[Hashable, Staging] = {}

    def place(self, key: Hashable, num_bytes: int) -> Tensor:
        """Memory for so much; of its own where that is more than was planned."""
        start, size = self._places.get(key, (0, 0))
        if self._room is not None and num_bytes <= size:
            return self._room.bytes[start : start + num_bytes]
        known = self._own.get(key)
        if known is None or known.bytes.numel() < num_bytes:
            if known is not None:
                known.unpin()
            known = self._own[key] = Staging(num_bytes, pin=self._pin)
        return known.bytes[:num_bytes]

    def close(self) -> None:
        """Give all of it back, when no copy is in flight any more."""
        for staging in (*self._own.values(), *([self._room] if self._room else ())):
            staging.unpin()
        self._room = None
        self._own.clear()


def aligned(num_bytes: int) -> int:
    """So many bytes, up to where the next place may begin."""
    return -(-num_bytes // ALIGNED) * ALIGNED


def input_of(shard: int, micro: int) -> Hashable:
    """The place of what enters a shard in a micro-batch; where they come one by one, of all."""
    return "input", shard, micro


def saved_of(shard: int) -> Hashable:
    """The place of what a shard's forward saved."""
    return "saved", shard


def planned_places(job: Job) -> dict[Hashable, int]:
    """What a step of a spilled trial has waiting on the host, as it was measured, in bytes.

    Slots of an array whose batch is another one wait beside the others.
    """
    technique, shards = job.technique, job.shards
    if not isinstance(technique, Spilled):
        return {}
    times = 1 if job.array is None else ROWS_APART
    away = generate.route_of(technique, shards).away
    at_once = job.micro_batches if technique.order == "shard" else 1
    sizes = {
        input_of(shard, micro): times * shards[shard].private_bytes + WIRES * ALIGNED
        for shard in away
        for micro in range(at_once)
    }
    moved = technique.spill_activations or ()
    return {**sizes, **{saved_of(shard): int(shards[shard].movable_bytes or 0) for shard in moved}}
