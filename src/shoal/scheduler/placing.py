"""Which waiting trial gets the next lease, and on which devices. Decides, changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shoal.core.seams import LeasePolicy
from shoal.scheduler.gathering import find_devices_to_call
from shoal.scheduler.roster import Roster, count_places
from shoal.scheduler.standing import TrialStanding


class Turn(NamedTuple):
    """Who is next, and its devices; a gang has to call them where some have no room yet."""

    trial: TrialStanding
    devices: tuple[str, ...]
    has_room: bool


def find_turn(roster: Roster, policy: LeasePolicy) -> Turn | None:
    """The waiting trial that goes first among those that free devices can take.

    A trial that has called its devices goes before all others, and a gang that may call them
    takes part as soon as one has room.
    """
    free = roster.free_of_waiting()
    call = roster.call
    if call and len(free[call.trial.trial]) >= call.trial.gang:
        return Turn(call.trial, choose_devices(roster, call.trial), True)
    calls = _possible_calls(roster, policy, free)
    able = [
        trial
        for trial in roster.waiting.values()
        if len(free[trial.trial]) >= trial.gang or trial.trial in calls
    ]
    if not able:
        return None
    first = _first(roster, policy, able, free)
    if first.trial in calls:
        return Turn(first, calls[first.trial], False)
    return Turn(first, choose_devices(roster, first), True)


def _possible_calls(
    roster: Roster, policy: LeasePolicy, free: Mapping[int, set[str]]
) -> dict[int, tuple[str, ...]]:
    """What the gangs would call that some devices have room for. One calls at a time."""
    if roster.call:
        return {}
    gangs = [t for t in roster.waiting.values() if 0 < len(free[t.trial]) < t.gang]
    calls = {gang.trial: find_devices_to_call(roster, policy, gang) for gang in gangs}
    return {trial: devices for trial, devices in calls.items() if devices}


def _first(
    roster: Roster,
    policy: LeasePolicy,
    able: Sequence[TrialStanding],
    free: Mapping[int, set[str]],
) -> TrialStanding:
    """The policy's first, or one that is close and was on the free devices before.

    Before them all comes one that is overdue.
    """
    if overdue := roster.first_overdue(able):
        return overdue
    able = _in_time(roster, able, free)
    first = max(able, key=policy.rank)
    if first.is_at_home(free[first.trial]):
        return first
    at_home = [t for t in able if t.is_at_home(free[t.trial]) and policy.is_close(first, t)]
    return max(at_home, key=policy.rank, default=first)


def _in_time(
    roster: Roster, able: Sequence[TrialStanding], free: Mapping[int, set[str]]
) -> Sequence[TrialStanding]:
    """Those that a free device can end in time beside its others; if none, the shortest."""
    if roster.active == 1:
        return able
    end_s = roster.end_s()
    fit = [t for t in able if any(roster.fits(t, name, end_s) for name in free[t.trial])]
    return fit or [min(able, key=lambda trial: trial.remaining_s)]


def choose_devices(roster: Roster, trial: TrialStanding) -> tuple[str, ...]:
    """Where the trial is best placed, a device for each stage of a gang; () without room.

    A gang goes where it was before, unless it would leave there at once for a better place.
    """
    free = _by_preference(roster, trial)
    best = free[: trial.gang]
    if trial.gang == 1 or len(best) < trial.gang:
        return tuple(best) if len(best) == trial.gang else ()
    at_home = sorted(free, key=lambda name: name not in trial.homes)[: trial.gang]
    is_better = gain_s(roster, trial, at_home, best) > trial.quantum_s
    return _in_order_of_stages(best if is_better else at_home, trial)


def _by_preference(roster: Roster, trial: TrialStanding) -> list[str]:
    """Devices with room: fewest trials first, then least to do, then where the trial was.

    Counted without the trial itself, so a leased trial may find that it is well placed.
    Trials of an array prefer the device with fewest of them.
    """
    keys: dict[str, tuple[int, float, bool]] = {}
    for name, held in roster.devices.items():
        if not roster.has_room(trial, name):
            continue
        others = [other for other in held if other is not trial]
        mates = sum(other.shares_array(trial) for other in others)
        count = mates if trial.lane else count_places(others)
        keys[name] = (count, roster.load_s(name, trial), name not in trial.homes)
    return sorted(keys, key=keys.__getitem__)


def _in_order_of_stages(devices: Sequence[str], gang: TrialStanding) -> tuple[str, ...]:
    """A device keeps the stage that it had; the new ones take the other stages in order."""
    fresh = iter([name for name in devices if name not in gang.homes])
    homes = gang.homes or (None,) * gang.gang
    return tuple(home if home is not None and home in devices else next(fresh) for home in homes)


def find_better_devices(roster: Roster, trial: TrialStanding) -> tuple[str, ...]:
    """Where a leased trial would better be, if that is worth a lease and the move; or ()."""
    best = _by_preference(roster, trial)[: trial.gang]
    if len(best) < trial.gang or set(best) == set(trial.devices):
        return ()
    return tuple(best) if gain_s(roster, trial, trial.devices, best) > trial.quantum_s else ()


def gain_s(
    roster: Roster, trial: TrialStanding, before: Iterable[str], after: Iterable[str]
) -> float:
    """How much sooner all these devices are done with the trial on the second ones."""
    rest_s = {name: roster.load_s(name, trial) for name in {*before, *after}}

    def done_s(places: Iterable[str]) -> float:
        with_it = set(places)
        return max(s + trial.remaining_s * (name in with_it) for name, s in rest_s.items())

    return done_s(before) - done_s(after)
