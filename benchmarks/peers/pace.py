"""Steps a second of several trials at a time, from the times at which their steps ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Ended(NamedTuple):
    """A step ended: when, and the CPU seconds that were used until then."""

    time_s: float
    cpu_s: float


class Pace(NamedTuple):
    """Per step of any trial."""

    seconds_a_step: float
    cpu_seconds_a_step: float


def pace(trials: Mapping[int, Sequence[Ended]], warm_up: int) -> Pace:
    """What a step costs while as many trials run as run together; warming up is left out.

    [Note: whole steps] Where all trials run together, each counts from its first end to its last
    one while all of them are warm and none is over: whole steps of its own, so that what the
    others have begun by then makes no difference. Their rates are added. Where they run one
    after another, each counts from its last step of warming up to its last step. The change
    from one to the next is left out in both, and so is what a lone last trial gains.
    """
    warm = {trial: ends[warm_up - 1 :] for trial, ends in trials.items()}
    begin = max(ends[0].time_s for ends in warm.values())
    end = min(ends[-1].time_s for ends in warm.values())
    together = {
        trial: [e for e in ends if begin <= e.time_s <= end] for trial, ends in warm.items()
    }
    if len(warm) > 1 and all(len(ends) > 1 for ends in together.values()):
        rate = sum((len(e) - 1) / (e[-1].time_s - e[0].time_s) for e in together.values())
        ends = sorted(e for inside in together.values() for e in inside)
        cpus = (ends[-1].cpu_s - ends[0].cpu_s) / (ends[-1].time_s - ends[0].time_s)
        return Pace(1 / rate, cpus / rate)
    steps = sum(len(ends) - 1 for ends in warm.values())
    seconds = sum(ends[-1].time_s - ends[0].time_s for ends in warm.values())
    cpu_seconds = sum(ends[-1].cpu_s - ends[0].cpu_s for ends in warm.values())
    return Pace(seconds / steps, cpu_seconds / steps)


def used_at(read: Sequence[Ended], at_s: float) -> float:
    """CPU seconds at a time, between those that were read before and after it."""
    after = next((n for n, one in enumerate(read) if one.time_s >= at_s), len(read) - 1)
    if not after:
        return read[0].cpu_s
    first, second = read[after - 1], read[after]
    if second.time_s <= first.time_s:
        return second.cpu_s
    share = (at_s - first.time_s) / (second.time_s - first.time_s)
    return first.cpu_s + share * (second.cpu_s - first.cpu_s)
