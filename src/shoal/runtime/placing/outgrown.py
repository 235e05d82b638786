"""A unit took more memory than was measured: the words for it, and how much more."""

from __future__ import annotations

from shoal.core.errors import CapacityError
from shoal.core.plan import Job
from shoal.core.units import Bytes, format_bytes
from shoal.program.costs import unit_peak_bytes
from shoal.program.ir import Action, Op, Part

LARGEST_FIRST = (
    "Where batches differ in size, let the first one be the largest: it is the one that is "
    "measured."
)


def outgrown(
    what: str,
    device: str,
    peak: Bytes,
    reserved: Bytes,
    error: CapacityError,
    *,
    scratch: int = 0,
) -> str:
    """The words: ``what`` allocated ``peak``, and ``error`` says why there is no room for it.

    ``scratch`` bytes of the peak were no tensor's.
    """
    inside = (
        f" ({format_bytes(Bytes(scratch))} of it scratch memory of a kernel)" if scratch else ""
    )
    return (
        f"{what} allocated {format_bytes(peak)} on {device}{inside}, {format_bytes(reserved)} "
        f"were reserved for it, and {no_room(error)}"
    )


def no_room(error: CapacityError) -> str:
    """What to do, and why; in this order, as a table has the first line alone."""
    why = str(error)
    return f"there is no room for the rest. {LARGEST_FIRST} {why[:1].upper()}{why[1:]}"


def growth_of(job: Job, action: Action, peak: Bytes, region: int, *, evaluates: bool) -> float:
    """How many times what was measured a unit took, to be planned for.

    A forward's peak is small, and grows by more than what it makes the plan grow by. ``region`` is
    what the trial has of the device for its slots.
    """
    own = unit_peak_bytes(action, job.shards[action.shard])
    largest = max(shard.backward_peak_bytes for shard in job.shards)
    measured = own if action.op is Op.B and not evaluates else largest
    expected = max(1, min(measured or largest, largest))
    kept = 0  # what earlier forwards saved has grown too, and is in ``peak``
    if Part.SAVED in action.parts:
        kept = max(0, job.held_bytes - region)
    return (peak + kept) / (expected + kept)
