"""What is said of arrays of trials whose batches vary in length. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.seats import ALONE
from shoal.core.spec import WidthMeasure

TO_DO = (
    "to have fewer, pad batches to one length or to multiples of one, or give all trials one seed "
    "(`seed` in the space), with which they read their data in one order"
)


def with_lengths(
    why: Sequence[str], widths: Sequence[WidthMeasure], taken: int
) -> tuple[str, ...]:
    """Why trials are in an array or in none, with what lengths of batches have to do with it."""
    told = told_of_passes(widths, taken)
    if taken == ALONE and any(TO_DO in line for line in told):
        return (f"{why[0]}: {told[0]}", *why[1:])
    return (*why, *told)


def told_of_passes(widths: Sequence[WidthMeasure], taken: int) -> tuple[str, ...]:
    """How many passes a step takes in the array that was taken, else in the widest one."""
    able = [found for found in widths if found.lengths and not found.declined]
    stacked = [found for found in able if found.kind != "branches"]
    if not stacked:
        return ()
    found = max(stacked, key=lambda found: (found.width == taken, found.width))
    head = f"batches vary in length, {found.lengths}"
    if found.passes == 1:
        return (f"{head}; those of all slots were of one length at each step that was timed",)
    return (
        f"{head}: a step of {found.width} slots takes {found.passes:.1f} passes, one for each "
        f"length among their batches; {TO_DO}",
    )
