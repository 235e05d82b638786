"""How often trials are saved, by what the disk bears. Pure.

[Note: two rules]
Here, before a study runs, for all trials that train at a time: they share the disk, which is to
be free for most of the time. While it runs, for each trial by itself: a save that took long is
followed by a pause of so many times its length (``runtime/saving/saver.py``), whatever was asked
for.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from shoal.core.units import Bytes, Seconds, format_bytes, format_rate, format_seconds

PART = 0.25
"""Of the interval, saving all trials that train at a time may take so much."""
FAR_SLOWER = 0.25
"""A disk that writes less than so much of what it is expected to is spoken of."""
_SHORT_S = 1.0  # what takes no longer is not worth a word


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """What generations of the ``trials`` that train at a time hold, and the largest of them."""

    together: Bytes
    largest: Bytes
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpeed:
    """What a disk writes, in bytes per second, and what it was expected to, if anything was."""

    place: str
    bytes_per_s: float
    expected_bytes_per_s: float | None

    @property
    def is_far_slower(self) -> bool:
        expected = self.expected_bytes_per_s
        return expected is not None and self.bytes_per_s < FAR_SLOWER * expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Seconds between a trial's generations, 0 for every step, and a sentence on why."""

    every_s: Seconds
    why: str = ""


def interval(
    states: States, disk: DiskSpeed, every_s: Seconds, *, is_named: bool, share: float
) -> Interval:
    """The interval that the disk bears, or the one that was named, with what it costs.

    Args:
        every_s: What was named, or what is usual; 0 is each step.
        share: Of a trial's time, at most this much may pass while it is saved.
    """
    all_s = Seconds(states.together / disk.bytes_per_s)
    is_heavy = all_s > max(PART * every_s, _SHORT_S)
    found = _found(states, disk, all_s)
    if not is_heavy:
        why = f"{found}; that is little enough: nothing is changed" if disk.is_far_slower else ""
        return Interval(every_s=every_s, why=why)
    borne_s = Seconds(float(ceil(all_s / PART)))
    rests = _rests(Seconds(states.largest / disk.bytes_per_s / share), every_s, share)
    if is_named:
        why = f"{found}. {_named(every_s, all_s)}{rests}. checkpoint_every={borne_s:.0f} is borne"
        return Interval(every_s=every_s, why=why)
    return Interval(
        every_s=borne_s,
        why=f"{found}, more than {PART:.0%} of the usual {format_seconds(every_s)}. So a trial is "
        f"first saved after {format_seconds(borne_s)}{rests}; a crash costs what was trained "
        "since a save. checkpoint_every= names another interval",
    )


def _found(states: States, disk: DiskSpeed, all_s: Seconds) -> str:
    """The disk, what was expected of it, and how long it takes to save what trains."""
    expected = ""
    if disk.expected_bytes_per_s is not None:
        far = "far less than" if disk.is_far_slower else "with"
        expected = f", {far} {format_rate(disk.expected_bytes_per_s)} expected (`shoal bench`)"
    who = (
        "the trial that trains" if states.trials == 1 else f"the {states.trials} trials that train"
    )
    return (
        f"the disk of {disk.place} writes {format_rate(disk.bytes_per_s)}, measured just "
        f"now{expected}: to save {who} at a time, {format_bytes(states.together)}, takes "
        f"{format_seconds(all_s)}"
    )


def _named(every_s: Seconds, all_s: Seconds) -> str:
    """What an interval costs that was asked for, and stays."""
    if not every_s:
        return (
            "checkpoint_every=0 stays, as it was named: when all of them step, they wait "
            f"{format_seconds(all_s)} for the disk"
        )
    return (
        f"checkpoint_every={every_s:g} ({format_seconds(every_s)}) stays, as it was named, of "
        f"which that is {all_s / every_s:.0%}"
    )


def _rests(rests_s: Seconds, every_s: Seconds, share: float) -> str:
    """What the pause after each save makes of the interval of the largest trial."""
    if not every_s or rests_s <= every_s:
        return ""
    return (
        f", and the largest from then on about every {format_seconds(rests_s)}, for a save is "
        f"followed by {1 / share:.0f} times as long without one"
    )
