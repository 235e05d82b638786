"""Which trials there are, who waits, who has which devices, and what each has to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shoal.scheduler.standing import TrialStanding

_PATIENCE = 4  # leases of later trials, for each place on the devices that a trial needs


class Call(NamedTuple):
    """A trial that waits for devices, and which: a place on each of them is kept for it."""

    trial: TrialStanding
    devices: tuple[str, ...]


class Roster:
    """The state of a study that the rules read; only ``Leases`` changes it.

    ``active`` trials share a device at a time.

    Attributes:
        devices: Those that joined, in that order, each with the trials that have a lease on it.
            A gang is listed under each of its own.
        trials: All that have not ended.
        waiting: Of them those without a lease and with steps to do.
        gangs: Of all those that need several devices.
        call: The trial whose turn it is while not enough devices have room for it; a gang mostly.
    """

    def __init__(self, active: int) -> None:
        self.active = active
        self.devices: dict[str, list[TrialStanding]] = {}
        self.trials: dict[int, TrialStanding] = {}
        self.waiting: dict[int, TrialStanding] = {}
        self.gangs: dict[int, TrialStanding] = {}
        self.call: Call | None = None

    # Changes

    def add(self, trial: TrialStanding) -> None:
        """The trial is there, and waits."""
        self.trials[trial.trial] = trial
        if trial.gang > 1:
            self.gangs[trial.trial] = trial
        self.wait(trial)

    def wait(self, trial: TrialStanding) -> None:
        """The trial is on no device; without steps to do it does not wait for one either."""
        if trial.steps_left != 0:
            self.waiting[trial.trial] = trial

    def lend(self, trial: TrialStanding, devices: tuple[str, ...]) -> int:
        """A waiting trial gets these; returns the steps of its lease."""
        del self.waiting[trial.trial]
        if self.gangs:
            self._pass_over(trial)
        for device in devices:
            self.devices[device].append(trial)
        if self.call and self.call.trial is trial:
            self.call = None
        return trial.lease(devices)

    def _pass_over(self, trial: TrialStanding) -> None:
        """Count what waits for longer; of single trials only a gang can keep a place from one."""
        for other in self.waiting.values():
            is_between_singles = trial.gang == other.gang == 1
            if other.arrival < trial.arrival and not is_between_singles:
                other.passed_over += self.is_possible(other)

    def clear(self, trial: TrialStanding) -> None:
        """Its places are free, on all devices that are left."""
        for device in trial.devices:
            if device in self.devices:
                self.devices[device].remove(trial)

    def remove(self, trial: TrialStanding) -> None:
        """The trial has ended."""
        self.clear(trial)
        self.waiting.pop(trial.trial, None)
        self.gangs.pop(trial.trial, None)
        del self.trials[trial.trial]
        if self.call and self.call.trial is trial:
            self.call = None

    def lose(self, device: str) -> list[TrialStanding]:
        """The device is gone; returns who had a lease there, as gangs perhaps on others too."""
        held = self.devices.pop(device)
        for trial in held:
            self.clear(trial)
        for trial in self.trials.values():
            trial.forget(device)
        if self.call and device in self.call.devices:
            self.call = None
        return held

    # Places

    def free(self, trial: TrialStanding) -> set[str]:
        """The devices that have room for the trial."""
        return {name for name in self.devices if self.has_room(trial, name)}

    def free_of_waiting(self) -> dict[int, set[str]]:
        """``free`` of each waiting trial, by number: without an array and a call all have one."""
        free: dict[int, set[str]] = {}
        of_most: set[str] | None = None
        for number, trial in self.waiting.items():
            if trial.lane is not None or (self.call and self.call.trial is trial):
                free[number] = self.free(trial)
                continue
            if of_most is None:
                of_most = self.free(trial)
            free[number] = of_most
        return free

    def has_room(self, trial: TrialStanding, device: str) -> bool:
        """Whether there is a place for it beside the others there, or its slot in their array."""
        others = [other for other in self.devices[device] if other is not trial]
        mates = [other.lane for other in others if other.shares_array(trial)]
        if mates:
            return trial.lane not in mates
        return count_places(others) + self._is_kept_from(trial, device) < self.active

    def _is_kept_from(self, trial: TrialStanding, device: str) -> bool:
        """Whether a gang that is not this trial has called a place there."""
        call = self.call
        return call is not None and call.trial is not trial and device in call.devices

    def is_possible(self, trial: TrialStanding) -> bool:
        """Whether there are enough devices for it, free or not."""
        return trial.gang == 1 or len(self.devices) >= trial.gang

    def is_overdue(self, trial: TrialStanding) -> bool:
        """Whether it was passed over so often that it goes first; see [Note: gangs]."""
        return bool(self.gangs) and trial.passed_over >= _PATIENCE * trial.gang * self.active

    def may_leave(self, trial: TrialStanding) -> bool:
        """Whether it may be made to leave for another trial; see [Note: arrays], [Note: gangs]."""
        return trial.lane is None and not self.is_overdue(trial)

    def wants_place(self, trial: TrialStanding, devices: Iterable[str]) -> bool:
        """Whether a place on one of these helps it; not where its array is, which has one."""
        return trial.lane is None or any(
            not any(other.shares_array(trial) for other in self.devices[name]) for name in devices
        )

    # Trials

    def waiting_singles(self) -> list[TrialStanding]:
        """Those that a place on any device helps."""
        if not self.gangs:
            return list(self.waiting.values())
        return [trial for trial in self.waiting.values() if trial.gang == 1]

    def first_overdue(self, trials: Iterable[TrialStanding]) -> TrialStanding | None:
        """Of those that are overdue the one that was added first."""
        overdue = (trial for trial in trials if self.is_overdue(trial))
        return min(overdue, key=lambda trial: trial.arrival, default=None)

    def running(self) -> list[TrialStanding]:
        """All that have a lease, by their first device."""
        return list(dict.fromkeys(trial for held in self.devices.values() for trial in held))

    def mates(self, trial: TrialStanding) -> list[TrialStanding]:
        """The others that share its device, or one of a gang's."""
        beside = (other for name in trial.devices for other in self.devices[name])
        return list(dict.fromkeys(other for other in beside if other is not trial))

    # Seconds

    def load_s(self, device: str, *without: TrialStanding | None) -> float:
        """What the device has to do; a gang counts in full on each of its devices."""
        return sum(t.remaining_s for t in self.devices[device] if t not in without)

    def fits(
        self,
        trial: TrialStanding,
        device: str,
        end_s: float,
        *,
        instead_of: TrialStanding | None = None,
    ) -> bool:
        """Could the device do this trial and its others by ``end_s``, give or take a lease?"""
        load_s = trial.remaining_s + self.load_s(device, trial, instead_of)
        return load_s <= end_s + trial.quantum_s

    def end_s(self) -> float:
        """Seconds until the earliest end of all: the work on all devices, or the longest trial."""
        if self.gangs:
            return self._end_beside_gangs_s()
        left_s = [trial.remaining_s for trial in self.trials.values()]
        return max(sum(left_s) / len(self.devices), max(left_s))

    def _end_beside_gangs_s(self) -> float:
        """Likewise; or those that go one after another, as two never have enough devices.

        They are the gangs of more than half of the devices, and a trial that fits beside none.
        """
        trials = [trial for trial in self.trials.values() if self.is_possible(trial)]
        work_s = sum(trial.remaining_s * trial.gang for trial in trials)
        wide = [trial for trial in trials if 2 * trial.gang > len(self.devices)]
        beside = len(self.devices) - min((trial.gang for trial in wide), default=0)
        others = [t for t in trials if t not in wide and t.gang > beside]
        in_turn_s = sum(t.remaining_s for t in wide) + _longest_s(others)
        return max(work_s / len(self.devices), _longest_s(trials), in_turn_s)


def _longest_s(trials: Iterable[TrialStanding]) -> float:
    return max((trial.remaining_s for trial in trials), default=0.0)


def count_places(held: Iterable[TrialStanding]) -> int:
    """Places that these trials take on a device: an array's trials one together."""
    held = list(held)
    return sum(t.lane is None for t in held) + len({t.lane[0] for t in held if t.lane})
