"""Host memory for what waits there between forward and backward: taken before the first step.

[Note: no pinning inside a step]
How much waits is planned to the byte, so one piece of memory is taken, and registered with CUDA,
when a lease begins. Places in it are dealt out as they are first asked for, and are used again in
each step. Only a batch that is larger than those that were measured gets memory of its own.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from shoal.core.plan import Job
from shoal.core.technique import Spilled
from shoal.core.units import Bytes
from shoal.memory.store import Staging
from shoal.spill import generate

ALIGNED = 64
"""Places begin at multiples of so many bytes, so that any type may be viewed there."""
WIRES = 8
"""Tensors that enter a shard; for more of them there may be no room between their places."""


class WaitingRoom:
    """Places by key; the caller's while the room is open.

    Raises:
        CapacityError: the host has not that much memory.
    """

    def __init__(self, num_bytes: int, *, pin: bool) -> None:
        self._pin, self._dealt = pin, 0
        self._room = Staging(num_bytes, pin=pin) if num_bytes else None
        self._places: dict[Hashable, Tensor] = {}
        self._own: dict[Hashable, Staging] = {}

    def place(self, key: Hashable, num_bytes: int) -> Tensor:
        """Memory for so much; of its own where a batch is larger than any before."""
        known = self._places.get(key)
        if known is None or known.numel() < num_bytes:
            known = self._places[key] = self._deal(key, num_bytes)
        return known[:num_bytes]

    def _deal(self, key: Hashable, num_bytes: int) -> Tensor:
        start, end = self._dealt, self._dealt + num_bytes
        if self._room is not None and end <= self._room.bytes.numel():
            self._dealt = -(-end // ALIGNED) * ALIGNED
            return self._room.bytes[start:end]
        if key in self._own:
            self._own[key].unpin()
        self._own[key] = Staging(num_bytes, pin=self._pin)
        return self._own[key].bytes

    def close(self) -> None:
        """Give all of it back, when no copy is in flight any more."""
        for staging in (*self._own.values(), *([self._room] if self._room else ())):
            staging.unpin()
        self._room = None
        self._places.clear()
        self._own.clear()


def room_bytes(job: Job) -> Bytes:
    """What a step of a spilled trial has waiting on the host at most, as it was measured.

    An array's inputs and what its forwards saved stay on the device.
    """
    technique, shards = job.technique, job.shards
    if not isinstance(technique, Spilled) or job.array is not None:
        return Bytes(0)
    away = generate.route_of(technique, len(shards)).away
    at_once = job.micro_batches if technique.order == "shard" else 1
    inputs = sum(shards[shard].private_bytes + WIRES * ALIGNED for shard in away)
    moved = [shards[shard].movable_bytes or 0 for shard in technique.spill_activations or ()]
    return Bytes(at_once * inputs + sum(moved) + ALIGNED * len(moved))
