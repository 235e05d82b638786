"""Which devices a gang calls, and who leaves them for it; see [Note: gangs] in leases.py."""

from __future__ import annotations

from shoal.core.seams import LeasePolicy
from shoal.scheduler.roster import Call, Roster
from shoal.scheduler.standing import TrialStanding


def find_devices_to_call(
    roster: Roster, policy: LeasePolicy, gang: TrialStanding
) -> tuple[str, ...]:
    """Devices that have room for the gang or can be made to have it; () if they are too few.

    Where a place is free, then where one becomes free anyway, then where the least in rank
    leaves. A trial that ranks before the gang, or not clearly after it, is not made to leave: it
    would come back first. One that is overdue has waited long enough to ask that of anybody.
    """
    keys: dict[str, tuple[int, float, bool]] = {}
    for name in roster.devices:
        is_new = name not in gang.homes
        leaver = _next_to_leave(roster, policy, name)
        if roster.has_room(gang, name):
            keys[name] = (0, 0.0, is_new)
        elif leaver and leaver.is_promised:
            keys[name] = (1, 0.0, is_new)
        elif leaver and _goes_before(roster, policy, gang, leaver):
            keys[name] = (2, policy.rank(leaver), is_new)
    return tuple(sorted(keys, key=keys.__getitem__)[: gang.gang]) if len(keys) >= gang.gang else ()


def _goes_before(
    roster: Roster, policy: LeasePolicy, gang: TrialStanding, leaver: TrialStanding
) -> bool:
    if roster.is_overdue(gang):
        return True
    return policy.rank(leaver) < policy.rank(gang) and not policy.is_close(gang, leaver)


def find_urgent_call(roster: Roster, policy: LeasePolicy) -> Call | None:
    """The call of one that is not to wait until a place is free: overdue, or without slack."""
    possible = [trial for trial in roster.waiting.values() if roster.is_possible(trial)]
    if overdue := roster.first_overdue(possible):
        devices = find_devices_to_call(roster, policy, overdue)
        return Call(overdue, devices) if devices else None
    first = max(possible, key=policy.rank, default=None)
    return _preempt(roster, policy, first) if first and first.gang > 1 else None


def _preempt(roster: Roster, policy: LeasePolicy, gang: TrialStanding) -> Call | None:
    """Its call, if the policy lets it preempt everyone who would have to leave."""
    devices = find_devices_to_call(roster, policy, gang)
    full = [name for name in devices if not roster.has_room(gang, name)]
    leavers = [_next_to_leave(roster, policy, name) for name in full]
    reach_s = roster.end_s() / roster.active
    may_all = all(t and (t.is_promised or policy.preempts(gang, t, reach_s)) for t in leavers)
    return Call(gang, devices) if devices and may_all else None


def is_called_away(roster: Roster, policy: LeasePolicy, trial: TrialStanding) -> bool:
    """Whether its place has been called: one trial leaves each device without room."""
    call = roster.call
    if call is None:
        return False
    full = [
        name
        for name in trial.devices
        if name in call.devices and not roster.has_room(call.trial, name)
    ]
    return any(_next_to_leave(roster, policy, name) is trial for name in full)


def _next_to_leave(roster: Roster, policy: LeasePolicy, device: str) -> TrialStanding | None:
    """Who leaves the device anyway, or else the least in rank there."""
    able = [trial for trial in roster.devices[device] if roster.may_leave(trial)]
    promised = [trial for trial in able if trial.is_promised]
    return min(promised or able, key=policy.rank, default=None)


def count_missing(roster: Roster) -> int:
    """Called places that are not free yet."""
    if roster.call is None:
        return 0
    return sum(not roster.has_room(roster.call.trial, name) for name in roster.call.devices)
