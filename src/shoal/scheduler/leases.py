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

[Note: gangs]
A gang is a trial that needs several devices at a time: a pipeline with a stage on each. It takes
a place on each of them and has all or none: it is granted them together, leaves them together, and
loses them together when one of them is lost. The first, where stage 0 is, is the leader and speaks
for all. What a gang has left counts in full on each of its devices.

Enough devices hardly ever have room at the same moment while others take each place that comes
free. So a gang *calls*: a place is kept for it on as many devices as it needs, and where none is
free one trial is not extended. Here a gang of two waits, and A ends:

    d0   A A A . . . G G G      kept, empty for less than a lease
    d1   B B B B B B G G G      B leaves at the end of its lease, and waits
    d2   C C C C C C C C C      not called, goes on

Rank decides, as it does between other trials. A gang calls when a place is free and it is the
policy's first for it, or when it is the first of all and may preempt those who would leave. It
calls away only trials that rank clearly after it: others would be the first to come back.
As long as it may not call, others have the places. One gang calls at a time, or two would keep
what the other waits for; it calls until it is granted, whatever the ranks are by then. On its
devices a gang can be preempted like any trial.

Where trials keep being added that rank first, rank alone would let a gang wait for ever: those
on its devices hardly ever rank after it all at once. And gangs that keep coming would leave no
place to a single trial. So a trial is *overdue* when later ones have passed it four times for
each place on the devices that it needs: any later trial a gang, and a later gang a single trial.
Then it goes first, calls anybody away although no place is free, and stays to its end. Only trials
of arrays do not leave for it; and a gang of more devices than there are waits, and nobody waits
for it.

Who is where is in roster.py; who is next in placing.py, who is called in gathering.py, who leaves
in leaving.py.

The same events give the same instructions, always.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal.core.errors import TransitionError
from shoal.core.seams import LeasePolicy
from shoal.scheduler.gathering import find_urgent_call
from shoal.scheduler.leaving import should_leave
from shoal.scheduler.placing import find_turn
from shoal.scheduler.roster import Call, Roster
from shoal.scheduler.standing import LEAST_LEASE_S, TrialStanding


@dataclass(frozen=True, slots=True)
class DeviceJoined:
    """A worker is ready for leases."""

    device: str


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """A worker died. Its trials wait again; a gang with a stage there leaves all its devices.

    ``steps_left`` says from where they go on (their last stored state); a trial that
    is not named goes on from the last step that was reported. ``lanes`` are those of trials that
    go on in another one.
    """

    device: str
    steps_left: Mapping[int, int | None] = field(default_factory=dict)
    lanes: Mapping[int, tuple[str, int] | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrialAdded:
    """A trial wants to run; also one that ended before and has new steps to do.

    ``steps_left`` None: not known yet. ``step_s`` is the predicted seconds of a step,
    ``switch_s`` what bringing the trial to another device costs. ``lane``: its array and its
    slot there. ``gang``: how many devices it needs at once, each for all of ``step_s``.
    ``steady_s``: for so many seconds it should run on where it can, because a stop costs it as
    much as steps do.
    """

    trial: int
    steps_left: int | None
    step_s: float
    switch_s: float = 0.0
    lane: tuple[str, int] | None = None
    gang: int = 1
    steady_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepFinished:
    """One step of a leased trial; ``seconds`` of device work that it took.

    ``steps_left`` tells the length of a trial whose length was not known until now;
    it is ignored for others. Of a gang the leader reports, the seconds of the whole step.
    """

    trial: int
    device: str
    seconds: float
    steps_left: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The worker reached the end of the lease, or of the trial, and stored its state.

    With ``steps_left`` 0 the trial waits for its TrialEnded and is not granted again.
    Of a gang the leader reports, when all its devices have let go of it.
    """

    trial: int
    device: str
    steps_left: int | None


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """A trial finished, failed or was stopped; its devices are free.

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
    """Admit the trial on the device and run ``steps`` steps.

    ``devices`` are all that it has, stage by stage; ``device`` is the first.
    """

    trial: int
    device: str
    steps: int
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", self.devices or (self.device,))


@dataclass(frozen=True, slots=True)
class ExtendLease:
    """Run ``steps`` more steps than were granted so far. ``device`` is a gang's leader."""

    trial: int
    device: str
    steps: int


Instruction = GrantLease | ExtendLease


class Leases:
    """The state machine of a study: events in, instructions out.

    ``active`` trials share a device at a time; a lease is about ``lease_s`` seconds.
    After a TransitionError nothing has changed.
    """

    def __init__(self, policy: LeasePolicy, *, active: int, lease_s: float) -> None:
        assert active >= 1
        assert lease_s > 0
        self._policy, self._lease_s = policy, lease_s
        self._roster = Roster(active)
        self._ended: set[int] = set()
        self._arrivals = 0
        self._held = False

    @property
    def waiting(self) -> tuple[int, ...]:
        """Trials that could run if devices were free, enough of them for a gang."""
        return tuple(self._roster.waiting)

    @property
    def leased(self) -> dict[str, tuple[int, ...]]:
        """For each device the trials that have a lease on it; a gang under each of its own."""
        return {name: tuple(t.trial for t in held) for name, held in self._roster.devices.items()}

    @property
    def called(self) -> dict[str, int]:
        """Devices with a place that is kept for a waiting trial, mostly a gang, and for which."""
        call = self._roster.call
        return dict.fromkeys(call.devices, call.trial.trial) if call else {}

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
        known = self._roster.devices
        if event.device in known:
            raise TransitionError(
                f"device {event.device!r} joined twice; {len(known)} devices are known. "
                "Report DeviceLost before it joins again."
            )
        known[event.device] = []

    def _device_lost(self, event: DeviceLost) -> None:
        held = self._roster.devices.get(event.device)
        if held is None:
            raise TransitionError(
                f"device {event.device!r} was lost but is not known; known are "
                f"{_names(self._roster.devices)}."
            )
        strangers = set(event.steps_left) - {trial.trial for trial in held}
        if strangers:
            raise TransitionError(
                f"device {event.device!r} was lost with steps_left of trials {_names(strangers)}, "
                f"which have no lease on it; leased there are {_names(t.trial for t in held)}."
            )
        for trial, steps_left in event.steps_left.items():
            _check_steps(f"trial {trial} on the lost device {event.device!r}", steps_left)
        for lost in self._roster.lose(event.device):
            lost.release(event.steps_left.get(lost.trial, lost.steps_left))
            lost.lane = event.lanes.get(lost.trial, lost.lane)
            self._roster.wait(lost)

    def _trial_added(self, event: TrialAdded) -> None:
        known = self._roster.trials
        if event.trial in known:
            raise TransitionError(
                f"trial {event.trial} was added twice; it has "
                f"{known[event.trial].steps_left} steps left. Report TrialEnded first."
            )
        if event.step_s <= 0 or event.switch_s < 0 or event.steps_left == 0:
            raise TransitionError(
                f"trial {event.trial} was added with steps_left={event.steps_left}, "
                f"step_s={event.step_s}, switch_s={event.switch_s}: give at least one step "
                "(or None), positive seconds a step and no negative cost."
            )
        _check_steps(f"trial {event.trial}", event.steps_left)
        _check_gang(event)
        trial = TrialStanding(
            trial=event.trial,
            steps_left=event.steps_left,
            step_s=event.step_s,
            switch_s=event.switch_s,
            lane=event.lane,
            gang=event.gang,
            arrival=self._arrivals,
            lease_s=max(self._lease_s, 2 * event.steady_s),
            least_s=max(LEAST_LEASE_S, 2 * event.steady_s),
        )
        self._arrivals += 1
        self._ended.discard(event.trial)
        self._roster.add(trial)

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
        self._roster.clear(trial)
        trial.release(event.steps_left)
        self._roster.wait(trial)

    def _trial_ended(self, event: TrialEnded) -> None:
        if event.trial in self._ended:
            return
        self._roster.remove(self._known(event.trial, "ended"))
        self._ended.add(event.trial)

    # Decisions

    def _grant(self) -> Iterable[Instruction]:
        """Leases for waiting trials, until no device that one may use has room."""
        while not self._held and (turn := find_turn(self._roster, self._policy)):
            if not turn.has_room:
                self._roster.call = Call(turn.trial, turn.devices)
                continue
            steps = self._roster.lend(turn.trial, turn.devices)
            yield GrantLease(turn.trial.trial, turn.devices[0], steps, turn.devices)

    def _extend(self, trial: TrialStanding) -> list[Instruction]:
        """Top the lease up, or let it run out."""
        steps = trial.next_steps()
        if self._held or steps <= 0 or not 0 < trial.lease_left <= trial.lease_steps // 2:
            return []
        self._find_call()
        trial.leaving = should_leave(self._roster, self._policy, trial)
        if trial.leaving:
            return []
        trial.lease_left += steps
        return [ExtendLease(trial.trial, trial.devices[0], steps)]

    def _find_call(self) -> None:
        """Let a waiting trial call before it is decided who leaves: who runs has less left now.

        Whoever can be granted has been, so a turn that is found here is a gang's that calls.
        """
        roster = self._roster
        if roster.call or not roster.gangs:
            return
        turn = find_turn(roster, self._policy)
        if turn is None:
            roster.call = find_urgent_call(roster, self._policy)
        else:
            roster.call = Call(turn.trial, turn.devices)

    # Lookups

    def _known(self, number: int, what: str) -> TrialStanding:
        trial = self._roster.trials.get(number)
        if trial is None:
            raise TransitionError(
                f"trial {number} {what} but was never added; "
                f"{len(self._roster.trials)} trials are known."
            )
        return trial

    def _leased_on(self, number: int, device: str, what: str) -> TrialStanding:
        trial = self._known(number, what)
        if trial.device != device:
            where = "waits" if trial.device is None else f"has its lease on {trial.device!r}"
            if trial.gang > 1 and trial.device:
                where += f", the leader of its gang on {', '.join(trial.devices)},"
            raise TransitionError(
                f"trial {number} {what} on {device!r}, but it {where} with "
                f"{trial.steps_left} steps left."
            )
        return trial


def _check_steps(who: str, steps_left: int | None) -> None:
    if steps_left is not None and steps_left < 0:
        raise TransitionError(f"{who} has {steps_left} steps left; there are at least 0.")


def _check_gang(event: TrialAdded) -> None:
    if event.gang < 1 or (event.gang > 1 and event.lane is not None):
        raise TransitionError(
            f"trial {event.trial} was added with gang={event.gang} and lane={event.lane}: give at "
            "least one device, and no lane to a trial that needs several."
        )


def _names(items: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, items))) or "none"
