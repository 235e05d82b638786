"""What is allocated on a device beside units: counted against the budget as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.core.errors import CapacityError
from shoal.core.units import Bytes
from shoal.partition.track import AllocationTracker
from shoal.runtime.interpret import Seat
from shoal.runtime.placing.outgrown import outgrown


def counted(seat: Seat[Any], work: Callable[[], None], what: str) -> None:
    """Run what is no action, and count every byte that it allocates against the budget.

    Raises:
        CapacityError: there is no room for it.
    """
    if not seat.counts:
        work()
        return
    tracker = AllocationTracker(as_alone=seat.session.job.array is None)
    before = seat.resident_bytes()
    with tracker:
        work()
    more = Bytes(tracker.peak_bytes)
    seat.peak_bytes = max(seat.peak_bytes, before + more)
    on_top = Bytes(before + more - seat.session.job.held_bytes)
    if on_top <= seat.unit_bytes:
        return
    reserved, seat.unit_bytes = seat.unit_bytes, on_top
    left = Bytes(max(0, more - on_top + reserved))
    try:
        seat.reserve_units()
    except CapacityError as error:
        who, device = f"{what} of trial {seat.trial}", seat.device.spec.name
        found = CapacityError(
            outgrown(who, device, more, left, error, scratch=tracker.scratch_bytes)
        )
        found.growth = on_top / reserved if reserved else found.growth
        raise found from None
