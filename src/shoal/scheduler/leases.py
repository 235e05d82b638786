"""Study level: which trial has which device, in leases of a few steps. Pure.

[Note: the life of a lease]
A lease is a number of steps of one trial on one device, about ``lease_s`` seconds of
work. It is topped up while at least one step of it is left, so that the answer is there
before the device needs it:

    worker    |s1|s2|s3|s4|s5|s6|...                  lease_s = 4 steps
    leases    Grant 4   Extend 2   Extend 2 ...       each when at most half is left
                  not extended: ... |s5|s6| LeaseEnded, the trial is free

Nothing takes a device away from a trial: not extending is how it leaves, at a step
boundary, with its state stored. So a decision takes effect after at most half a
lease. A worker that has ended a lease ignores an ExtendLease that was still on its way;
messages to one worker keep their order, so a later GrantLease is never confused with it.

[Note: more trials than one on a device]
``active`` trials share one compute stream: each gets about 1/active of it, and the
copies of one hide behind the other's units. While trials wait every device has
``active`` of them; a free place goes to a trial that the device can end in time beside
its others, and among those to the policy's first. When none waits they spread: a trial leaves a
device for one with fewer trials, or as many and less to do, if that ends the study
sooner by more than a lease and a move.

[Note: arrays]
Trials of an array have a *lane*: the array and their slot in it. All trials of an array that are
on a device take one of its ``active`` places together, and no two of them have one slot. They
leave at their ends only: an array that loses a slot costs as much as before.

The same events give the same instructions, always.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal.core.errors import TransitionError
from shoal.core.seams import LeasePolicy
from shoal.scheduler.standing import TrialStanding


@dataclass(frozen=True, slots=True)
class DeviceJoined:
    """A worker is ready for leases."""

    device: str


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """A worker died. Its trials wait again.

    ``steps_left`` says from where they go on (their last stored state); a trial that
    is not named goes on from the last step that was reported.
    """

    device: str
    steps_left: Mapping[int, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrialAdded:
    """A trial wants to run; also one that ended before and has new steps to do.

    ``steps_left`` None: not known yet. ``step_s`` is the predicted seconds of a step,
    ``switch_s`` what bringing the trial to another device costs. ``devices`` are those
    it may run on, None for any. ``lane``: its array and its slot there.
    """

    trial: int
    steps_left: int | None
    step_s: float
    switch_s: float = 0.0
    devices: frozenset[str] | None = None
    lane: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class StepFinished:
    """One step of a leased trial; ``seconds`` of device work that it took.

    ``steps_left`` tells the length of a trial whose length was not known until now;
    it is ignored for others.
    """

    trial: int
    device: str
    seconds: float
    steps_left: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The worker reached the end of the lease, or of the trial, and stored its state.

    With ``steps_left`` 0 the trial waits for its TrialEnded and is not granted again.
    """

    trial: int
    device: str
    steps_left: int | None


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """A trial finished, failed or was stopped; its device is free.

    What its worker had already sent about it may still arrive and is ignored.
    """

    trial: int


@dataclass(frozen=True, slots=True)
class Held:
    """The study pauses: no lease is granted or extended until ``Released``."""


@dataclass(frozen=True, slots=True)
class Released:
    """The study goes on."""


Event = (
    DeviceJoined
    | DeviceLost
    | TrialAdded
    | StepFinished
    | LeaseEnded
    | TrialEnded
    | Held
    | Released
)


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Admit the trial on the device and run ``steps`` steps. Tickets count grants."""

    trial: int
    device: str
    steps: int
    ticket: int


@dataclass(frozen=True, slots=True)
class ExtendLease:
    """Run ``steps`` more steps than were granted so far."""

    trial: int
    device: str
    steps: int


Instruction = GrantLease | ExtendLease


class Leases:
    """The state machine of a study: events in, instructions out.

    ``active`` trials share a device at a time; a lease is about ``lease_s`` seconds.
    After a TransitionError nothing has changed.
    """

    def __init__(self, policy: LeasePolicy, *, active: int = 1, lease_s: float = 2.0) -> None:
        assert active >= 1
        assert lease_s > 0
        self._policy, self._active, self._lease_s = policy, active, lease_s
        self._devices: dict[str, list[TrialStanding]] = {}
        self._trials: dict[int, TrialStanding] = {}  # not ended
        self._waiting: dict[int, TrialStanding] = {}  # not ended, not leased, with steps to do
        self._ended: set[int] = set()
        self._arrivals = 0
        self._tickets = 0
        self._held = False

    @property
    def waiting(self) -> tuple[int, ...]:
        """Trials that could run if a device were free."""
        return tuple(self._waiting)

    @property
    def leased(self) -> dict[str, tuple[int, ...]]:
        """For each device the trials that have a lease on it."""
        return {name: tuple(t.trial for t in held) for name, held in self._devices.items()}

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; returns what the workers are to do, in order.

        Raises:
            TransitionError: the event cannot have happened in this state.
        """
        match event:
            case StepFinished():
                return self._step_finished(event)
            case LeaseEnded():
                self._lease_ended(event)
            case TrialAdded():
                self._trial_added(event)
            case TrialEnded():
                self._trial_ended(event)
            case DeviceJoined():
                self._device_joined(event)
            case DeviceLost():
                self._device_lost(event)
            case Held() | Released():
                self._held = isinstance(event, Held)
        return list(self._grant())

    # Events

    def _device_joined(self, event: DeviceJoined) -> None:
        if event.device in self._devices:
            raise TransitionError(
                f"device {event.device!r} joined twice; {len(self._devices)} devices are known. "
                "Report DeviceLost before it joins again."
            )
        self._devices[event.device] = []

    def _device_lost(self, event: DeviceLost) -> None:
        held = self._devices.get(event.device)
        if held is None:
            raise TransitionError(
                f"device {event.device!r} was lost but is not known; known are "
                f"{_names(self._devices)}."
            )
        strangers = set(event.steps_left) - {trial.trial for trial in held}
        if strangers:
            raise TransitionError(
                f"device {event.device!r} was lost with steps_left of trials {_names(strangers)}, "
                f"which have no lease on it; leased there are {_names(t.trial for t in held)}."
            )
        for trial, steps_left in event.steps_left.items():
            _check_steps(f"trial {trial} on the lost device {event.device!r}", steps_left)
        del self._devices[event.device]
        for lost in held:
            lost.release(event.steps_left.get(lost.trial, lost.steps_left))
            self._wait(lost)
        for trial_ in self._trials.values():
            if trial_.home == event.device:
                trial_.home = None

    def _trial_added(self, event: TrialAdded) -> None:
        if event.trial in self._trials:
            raise TransitionError(
                f"trial {event.trial} was added twice; it has "
                f"{self._trials[event.trial].steps_left} steps left. Report TrialEnded first."
            )
        if event.step_s <= 0 or event.switch_s < 0 or event.steps_left == 0:
            raise TransitionError(
                f"trial {event.trial} was added with steps_left={event.steps_left}, "
                f"step_s={event.step_s}, switch_s={event.switch_s}: give at least one step "
                "(or None), positive seconds a step and no negative cost."
            )
        _check_steps(f"trial {event.trial}", event.steps_left)
        trial = TrialStanding(
            trial=event.trial,
            steps_left=event.steps_left,
            step_s=event.step_s,
            switch_s=event.switch_s,
            devices=event.devices,
            lane=event.lane,
            arrival=self._arrivals,
            lease_s=self._lease_s,
        )
        self._arrivals += 1
        self._ended.discard(event.trial)
        self._trials[event.trial] = trial
        self._wait(trial)

    def _step_finished(self, event: StepFinished) -> list[Instruction]:
        if event.trial in self._ended:
            return []
        trial = self._leased_on(event.trial, event.device, "finished a step")
        if trial.lease_left == 0 or event.seconds < 0:
            raise TransitionError(
                f"trial {event.trial} finished a step of {event.seconds} s on {event.device!r} "
                f"with {trial.lease_left} steps left in its lease ({trial.steps_left} in all)."
            )
        _check_steps(f"trial {event.trial} on {event.device!r}", event.steps_left)
        trial.measure(event.seconds)
        trial.learn(event.steps_left)
        return self._extend(trial)

    def _lease_ended(self, event: LeaseEnded) -> None:
        if event.trial in self._ended:
            return
        trial = self._leased_on(event.trial, event.device, "ended its lease")
        _check_steps(f"trial {event.trial} on {event.device!r}", event.steps_left)
        before = trial.leased_from
        if before is not None and (event.steps_left is None or event.steps_left > before):
            raise TransitionError(
                f"trial {event.trial} ended its lease on {event.device!r} with "
                f"{event.steps_left} steps left; it had {before} when the lease began."
            )
        self._devices[event.device].remove(trial)
        trial.release(event.steps_left)
        self._wait(trial)

    def _trial_ended(self, event: TrialEnded) -> None:
        if event.trial in self._ended:
            return
        trial = self._known(event.trial, "ended")
        if trial.device is not None:
            self._devices[trial.device].remove(trial)
        self._waiting.pop(event.trial, None)
        del self._trials[event.trial]
        self._ended.add(event.trial)

    # Decisions

    def _grant(self) -> Iterable[Instruction]:
        """Leases for waiting trials, until no device that one may use has room."""
        while not self._held and (trial := self._next_trial()):
            device = self._best_device(trial)
            assert device is not None
            del self._waiting[trial.trial]
            self._devices[device].append(trial)
            self._tickets += 1
            yield GrantLease(trial.trial, device, trial.lease(device), self._tickets)

    def _next_trial(self) -> TrialStanding | None:
        """The waiting trial that goes first among those that a free device can take."""
        free = {trial.trial: self._free(trial) for trial in self._waiting.values()}
        able = [trial for trial in self._waiting.values() if free[trial.trial]]
        if not able:
            return None
        able = self._in_time(able, free)
        first = max(able, key=self._policy.rank)
        if first.home in free[first.trial]:
            return first
        at_home = [t for t in able if t.home in free[t.trial] and self._policy.is_close(first, t)]
        return max(at_home, key=self._policy.rank, default=first)

    def _free(self, trial: TrialStanding) -> set[str]:
        """The devices that have room for the trial."""
        return {
            name
            for name, held in self._devices.items()
            if trial.may_run_on(name) and self._has_room(trial, held)
        }

    def _has_room(self, trial: TrialStanding, held: Iterable[TrialStanding]) -> bool:
        """Whether there is a place for it beside these trials, or its slot in their array."""
        held = list(held)
        mates = [other.lane for other in held if other.shares_array(trial)]
        return trial.lane not in mates if mates else _places(held) < self._active

    def _in_time(
        self, able: list[TrialStanding], free: Mapping[int, set[str]]
    ) -> list[TrialStanding]:
        """Those that a free device can end in time beside its others; if none, the shortest."""
        if self._active == 1:
            return able
        end_s = self._end_s()
        fit = [t for t in able if any(self._fits(t, name, end_s) for name in free[t.trial])]
        return fit or [min(able, key=_remaining_s)]

    def _best_device(self, trial: TrialStanding) -> str | None:
        """With fewest trials, then least to do, then where the trial was; None when full.

        Counted without the trial itself, so a leased trial may find that it is well placed.
        Trials of an array prefer the device with fewest of them.
        """
        best: tuple[int, float, bool] | None = None
        device = None
        for name, held in self._devices.items():
            others = [other for other in held if other is not trial]
            if not self._has_room(trial, others) or not trial.may_run_on(name):
                continue
            mates = sum(other.shares_array(trial) for other in others)
            key = (mates if trial.lane else _places(others), _load_s(others), name != trial.home)
            if best is None or key < best:
                best, device = key, name
        return device

    def _extend(self, trial: TrialStanding) -> list[Instruction]:
        """Top the lease up, or let it run out."""
        steps = trial.next_steps()
        if self._held or steps <= 0 or not 0 < trial.lease_left <= trial.lease_steps // 2:
            return []
        trial.leaving = self._should_leave(trial)
        if trial.leaving:
            return []
        trial.lease_left += steps
        assert trial.device is not None
        return [ExtendLease(trial.trial, trial.device, steps)]

    def _should_leave(self, trial: TrialStanding) -> bool:
        """One device alone ends at the same time in any order, so there nobody leaves."""
        if len(self._devices) == 1 or trial.lane is not None:
            return False
        if not self._waiting:
            return self._should_move(trial)
        return self._is_preempted(trial) or self._is_misplaced(trial)

    def _is_preempted(self, trial: TrialStanding) -> bool:
        """Does a waiting trial need this one's place, and is it the right one to give it up?

        Places that become free anyway go to the first in the queue; the next one asks.
        """
        rank, end_s = self._policy.rank, self._end_s()
        running = [t for t in self._running() if t.lane is None]
        staying = [t for t in running if t is trial or not t.is_promised]
        promised = len(running) - len(staying)
        queue = [t for t in self._waiting.values() if self._wants_place(t, trial.device or "")]
        if promised >= len(queue):
            return False
        waiting = sorted(queue, key=rank, reverse=True)[promised]
        if not self._policy.preempts(waiting, trial, end_s / self._active):
            return False
        victims = [t for t in staying if waiting.may_run_on(t.device or "")]
        fit = [t for t in victims if self._fits(waiting, t.device or "", end_s, instead_of=t)]
        return min(fit or victims, key=rank) is trial

    def _wants_place(self, trial: TrialStanding, device: str) -> bool:
        """Whether a waiting trial could do with a place there; one whose array is there cannot."""
        has_array = any(other.shares_array(trial) for other in self._devices[device])
        return trial.may_run_on(device) and not has_array

    def _is_misplaced(self, trial: TrialStanding) -> bool:
        """Has its device more to do than time, and would a waiting trial fit better?

        The longest trial of a device stays; one leaves at a time.
        """
        mates = self._mates(trial)
        if not mates or any(t.leaving for t in mates):
            return False
        assert trial.device is not None
        if self._fits(trial, trial.device, self._end_s()):
            return False
        if trial.remaining_s >= max(map(_remaining_s, mates)):
            return False
        shortest_s = min(map(_remaining_s, self._waiting.values()))
        return trial.remaining_s - shortest_s > trial.quantum_s

    def _should_move(self, trial: TrialStanding) -> bool:
        """Nothing waits: would the study end sooner with this trial on another device?

        One trial at a time leaves a device; where it goes is decided when it comes free.
        """
        mates = self._mates(trial)
        if not mates or any(t.leaving for t in mates):
            return False
        target = self._best_device(trial)
        if target is None or target == trial.device:
            return False
        rest_s, there_s = _load_s(mates), _load_s(self._devices[target])
        here_s = rest_s + trial.remaining_s
        return here_s - max(rest_s, there_s + trial.remaining_s) > trial.quantum_s

    def _end_s(self) -> float:
        """Seconds until the earliest end of all: the work on all devices, or the longest trial."""
        left_s = [trial.remaining_s for trial in self._trials.values()]
        return max(sum(left_s) / len(self._devices), max(left_s))

    def _fits(
        self,
        trial: TrialStanding,
        device: str,
        end_s: float,
        *,
        instead_of: TrialStanding | None = None,
    ) -> bool:
        """Could the device do this trial and its others by ``end_s``, give or take a lease?"""
        others = [t for t in self._devices[device] if t is not trial and t is not instead_of]
        load_s = trial.remaining_s + _load_s(others)
        return trial.may_run_on(device) and load_s <= end_s + trial.quantum_s

    # Lookups

    def _mates(self, trial: TrialStanding) -> list[TrialStanding]:
        """The others that share its device."""
        return [t for t in self._devices[trial.device or ""] if t is not trial]

    def _running(self) -> Iterable[TrialStanding]:
        return (trial for held in self._devices.values() for trial in held)

    def _wait(self, trial: TrialStanding) -> None:
        if trial.steps_left != 0:
            self._waiting[trial.trial] = trial

    def _known(self, number: int, what: str) -> TrialStanding:
        trial = self._trials.get(number)
        if trial is None:
            raise TransitionError(
                f"trial {number} {what} but was never added; {len(self._trials)} trials are known."
            )
        return trial

    def _leased_on(self, number: int, device: str, what: str) -> TrialStanding:
        trial = self._known(number, what)
        if trial.device != device:
            where = "waits" if trial.device is None else f"has its lease on {trial.device!r}"
            raise TransitionError(
                f"trial {number} {what} on {device!r}, but it {where} with "
                f"{trial.steps_left} steps left."
            )
        return trial


def _check_steps(who: str, steps_left: int | None) -> None:
    if steps_left is not None and steps_left < 0:
        raise TransitionError(f"{who} has {steps_left} steps left; there are at least 0.")


def _remaining_s(trial: TrialStanding) -> float:
    return trial.remaining_s


def _load_s(trials: Iterable[TrialStanding]) -> float:
    return sum(map(_remaining_s, trials))


def _places(held: Iterable[TrialStanding]) -> int:
    """Places that these trials take on a device: an array's trials one together."""
    held = list(held)
    return sum(t.lane is None for t in held) + len({t.lane[0] for t in held if t.lane})


def _names(items: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, items))) or "none"
