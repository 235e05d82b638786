"""Reservations of one tier: bytes are promised here before they are allocated."""

from __future__ import annotations

from heapq import nlargest

from shoal.core.errors import CapacityError
from shoal.core.units import Bytes, format_bytes


class Ledger:
    """Who holds how many bytes of one tier; never more in total than its capacity.

    A reservation is all or nothing: after a refusal the ledger is as it was. An owner
    may reserve again and then holds the sum. Belongs to one thread; it promises bytes
    and allocates none.
    """

    def __init__(self, tier: str, capacity: Bytes) -> None:
        assert capacity >= 0, f"capacity of {tier} is {capacity} bytes"
        self.tier = tier
        self.capacity = capacity
        self._held: dict[str, int] = {}
        self._used = 0
        self._peak = 0

    @property
    def used(self) -> Bytes:
        return Bytes(self._used)

    @property
    def free(self) -> Bytes:
        return Bytes(self.capacity - self._used)

    @property
    def peak(self) -> Bytes:
        """The most that was ever used at once."""
        return Bytes(self._peak)

    def held(self, owner: str) -> Bytes:
        """What ``owner`` holds now; 0 for one who holds nothing."""
        return Bytes(self._held.get(owner, 0))

    def reserve(self, owner: str, size: Bytes) -> None:
        """Promise ``size`` bytes to ``owner``, on top of what it holds.

        Raises:
            CapacityError: less is free; nothing was reserved.
        """
        assert size >= 0, f"{owner!r} asks for {size} bytes of {self.tier}"
        if size > self.free:
            raise CapacityError(self._refusal(owner, size))
        self._held[owner] = self._held.get(owner, 0) + size
        self._used += size
        self._peak = max(self._peak, self._used)

    def release(self, owner: str) -> Bytes:
        """Take back all that ``owner`` holds, and say how much it was.

        An owner who holds nothing gives back 0, so cleaning up twice is harmless.
        """
        size = self._held.pop(owner, 0)
        self._used -= size
        return Bytes(size)

    def _refusal(self, owner: str, size: Bytes) -> str:
        missing = size - self.free
        exact = f" ({missing} bytes are missing)" if missing * 100 < size else ""
        return (
            f"cannot reserve {format_bytes(size)} on {self.tier} for {owner!r}: "
            f"{format_bytes(self.free)} of {format_bytes(self.capacity)} are free{exact}.\n"
            f"{self._way_out(size)}"
        )

    def _way_out(self, size: Bytes) -> str:
        if size > self.capacity:
            return (
                f"It can never fit on {self.tier}, even alone: cut this trial into smaller "
                "shards, or raise the budget."
            )
        largest = nlargest(3, self._held.items(), key=lambda item: item[1])
        holders = ", ".join(f"{owner!r} {format_bytes(held)}" for owner, held in largest)
        return (
            f"Largest holders: {holders}. Evict one of them first, or cut this trial into "
            "smaller shards."
        )
