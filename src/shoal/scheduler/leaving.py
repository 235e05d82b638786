"""Whether a lease is to run out, so that its place comes free. Decides, changes nothing."""

from __future__ import annotations

from shoal.core.seams import LeasePolicy
from shoal.scheduler.gathering import count_missing, is_called_away
from shoal.scheduler.placing import find_better_devices
from shoal.scheduler.roster import Roster
from shoal.scheduler.standing import TrialStanding


def should_leave(roster: Roster, policy: LeasePolicy, trial: TrialStanding) -> bool:
    """One device alone ends at the same time in any order, so there nobody leaves."""
    if len(roster.devices) == 1 or trial.lane is not None:
        return False
    if is_called_away(roster, policy, trial):
        return True
    if not roster.waiting_singles():
        return _should_move(roster, trial)
    if not roster.may_leave(trial):
        return False
    return _is_preempted(roster, policy, trial) or _is_misplaced(roster, trial)


def _is_preempted(roster: Roster, policy: LeasePolicy, trial: TrialStanding) -> bool:
    """Does a waiting trial need this one's place, and is it the right one to give it up?

    Places that become free anyway go to the first in the queue; the next one asks.
    """
    end_s = roster.end_s()
    running = [t for t in roster.running() if roster.may_leave(t)]
    leaving = [t for t in running if t is not trial and t.is_promised]
    promised = max(0, sum(t.gang for t in leaving) - count_missing(roster))
    queue = [t for t in roster.waiting_singles() if roster.wants_place(t, trial.devices)]
    if promised >= len(queue):
        return False
    waiting = sorted(queue, key=policy.rank, reverse=True)[promised]
    if not policy.preempts(waiting, trial, end_s / roster.active):
        return False
    staying = [t for t in running if t not in leaving]
    fit = [
        t
        for t in staying
        if any(roster.fits(waiting, name, end_s, instead_of=t) for name in t.devices)
    ]
    return min(fit or staying, key=policy.rank) is trial


def _is_misplaced(roster: Roster, trial: TrialStanding) -> bool:
    """Has its device more to do than time, and would a waiting trial fit better?

    The longest trial of a device stays; one leaves at a time. A gang stays as well, since
    whoever is beside it leaves fewer places empty.
    """
    mates = roster.mates(trial)
    if trial.gang > 1 or not mates or any(t.leaving for t in mates):
        return False
    if roster.fits(trial, trial.devices[0], roster.end_s()):
        return False
    if trial.remaining_s >= max(t.remaining_s for t in mates):
        return False
    shortest_s = min(t.remaining_s for t in roster.waiting_singles())
    return trial.remaining_s - shortest_s > trial.quantum_s


def _should_move(roster: Roster, trial: TrialStanding) -> bool:
    """Nothing waits: would the study end sooner with this trial on another device?

    One trial at a time leaves a device; where it goes is decided when it comes free.
    """
    mates = roster.mates(trial)
    if not mates or any(t.leaving for t in mates):
        return False
    return bool(find_better_devices(roster, trial))
