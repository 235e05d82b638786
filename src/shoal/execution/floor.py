"""What every part of a run shares: the trials, the leases, the workers, the events.

[Note: who calls whom]
``run`` takes messages and hands them to the part that they concern; the parts call the floor
and what is below them, never each other's inside:

    run  ->  recovery   (dead workers, starting over)
         ->  replanning (smaller jobs, more trials)
         ->  pausing    (parking and saving)
         ->  endings    (finished, stopped, failed)
                         all ->  floor (leases out, events out)

[Note: planning while trials run]
Who plans waits for answers of the workers, and what else arrives meanwhile is dealt with under
it: ``Execution._receive_for_planner``. So whoever plans finds the world changed afterwards: the
trial may have ended, its device may be gone. Two plans are never under way at once: what may
plan (a lack of memory, more trials) waits in ``Execution.when_free``.
"""

from __future__ import annotations

import math
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import combinations

from shoal.core import event as events
from shoal.core.errors import CapacityError, ShoalError, StorageError
from shoal.core.plan import Job, Plan
from shoal.core.units import format_bytes
from shoal.execution.trial import TrialRun
from shoal.memory.store import create_region
from shoal.pipeline.stops import STEADY_S
from shoal.runtime.pool import Worker, WorkerPool
from shoal.runtime.saving.saver import interval_s
from shoal.runtime.wire.messages import Extend, Grant, Settings, Stop
from shoal.scheduler import leases
from shoal.scheduler.policy import LongestRemainingFirst

LEASE_S = 2.0
Sink = Callable[[Sequence[events.Event]], None]


@dataclass(slots=True)
class Tally:
    """How many trials ended how, and why the run ended before all had."""

    finished: int = 0
    failed: int = 0
    stopped: int = 0
    pruned: int = 0
    reason: str = ""
    error: ShoalError | None = None


class Floor:
    """The state of a run; one thread's.

    Attributes:
        states: Every trial of the plan, ended ones too.
        open: Those that have not ended.
        fail: Called with a trial and its error, when a lease of it cannot begin.
        hear: Called with each event that is told, if anybody wants to hear them.
        fits_host: Whether the states of these jobs may be in the host's memory at a time.
        on_full: Called when events could be written only by giving back the reserve.
    """

    def __init__(
        self,
        plan: Plan,
        pool: WorkerPool,
        settings: Settings,
        sink: Sink,
        release_reserve: Callable[[], bool],
    ) -> None:
        self.plan, self.pool, self.settings = plan, pool, settings
        self.rule = plan.rule  # the newest plan's
        self.release_reserve = release_reserve
        self.tally = Tally()
        self.states: dict[int, TrialRun] = {}
        self.open: set[int] = set()
        self.fail: Callable[[int, str], None] = lambda trial, error: None
        self.hear: Callable[[events.Event], None] | None = None
        self.on_full: Callable[[StorageError], None] = lambda error: None
        self.fits_host: Callable[[Sequence[Job]], bool] = lambda jobs: True
        self._write = sink
        self._happened: list[events.Event] = []
        self._instructions: deque[leases.Instruction] = deque()  # the first one is under way
        self._deferred: list[TrialRun] = []  # the host has no room for them yet
        self._unanswered: Counter[tuple[Worker, int]] = Counter()  # Stops of a trial
        self._leases = leases.Leases(LongestRemainingFirst(), active=plan.active, lease_s=LEASE_S)

    def tell(self, event: events.Event) -> None:
        """Have an event written with the others of this message."""
        self._happened.append(event)
        if self.hear is not None:
            self.hear(event)

    def tell_replanned(self, job: Job, step: int, reason: str) -> None:
        """Have written that a trial's numerics are others from a step on, and why."""
        self.tell(
            events.TrialReplanned(
                time=time.time(),
                trial=job.trial,
                step=step,
                reason=reason,
                technique=type(job.technique).__name__,
                shards=len(job.shards),
                peak_bytes=job.peak_bytes,
                numerics=dict(job.numerics),
            )
        )

    def flush(self) -> None:
        """Write what a message brought, in one go."""
        happened, self._happened = self._happened, []
        if not happened:
            return
        try:
            self._write(happened)
        except StorageError as error:
            self._write_again(happened, error)
        for worker in self.pool.workers.values():
            worker.acknowledge()

    def _write_again(self, happened: Sequence[events.Event], error: StorageError) -> None:
        """Give back the reserve, write, and stop: there may be no second time."""
        if not self.release_reserve():
            raise error
        self._write(happened)
        self.tell(
            events.StorageFailed(
                time=time.time(), path=self.settings.directory, error=str(error), action="stops"
            )
        )
        self.on_full(error)

    # -- leases ----------------------------------------------------------------------------

    def begin(self, state: TrialRun) -> None:
        """Have the trial wait for a device."""
        if self.is_deferred(state):
            self._deferred.remove(state)
        job = state.job
        moved = sum(s.owned_bytes + s.state_bytes for s in job.shards)
        self.do(
            leases.TrialAdded(
                job.trial,
                state.steps_left or None,  # none left: it still has to evaluate and be saved
                step_s=max(float(job.takes_s), 1e-6),
                switch_s=moved / 1e9 + float(job.takes_s),
                lane=_lane(job),
                gang=job.gang,
                steady_s=STEADY_S if job.runs_on else 0.0,
            )
        )

    def do(self, event: leases.Event) -> None:
        """Tell the lease machine, and do what it says."""
        self.obey(self._leases.handle(event))

    def lose_device(
        self, device: str, steps_left: dict[int, int | None]
    ) -> Sequence[leases.Instruction]:
        """A worker died: its trials wait again. Returns what is to be obeyed then."""
        lanes = {trial: _lane(self.states[trial].job) for trial in steps_left}
        return self._leases.handle(leases.DeviceLost(device, steps_left, lanes))

    def obey(self, instructions: Sequence[leases.Instruction]) -> None:
        """Send what the lease machine decided.

        What one of these brings about is done after them, not inside of it: hundreds of trials in
        a row may find no room on the host.
        """
        is_under_way = bool(self._instructions)
        self._instructions.extend(instructions)
        if is_under_way:
            return
        try:
            while self._instructions:
                self._obey_one(self._instructions[0])
                self._instructions.popleft()
        finally:
            self._instructions.clear()

    def _obey_one(self, instruction: leases.Instruction) -> None:
        if instruction.trial not in self.open:
            return
        if isinstance(instruction, leases.ExtendLease):
            self._extend(instruction)
        else:
            self._grant(instruction)

    def _extend(self, instruction: leases.ExtendLease) -> None:
        state = self.states[instruction.trial]
        if not state.after_save:  # else it is on its way out
            state.until = state.before_halt(state.until + instruction.steps)
            worker = self.pool.workers[instruction.device]
            worker.send(Extend(instruction.trial, state.until))

    def _grant(self, instruction: leases.GrantLease) -> None:
        state, device = self.states[instruction.trial], instruction.device
        if not self._has_region(state):
            return
        assert state.descriptor is not None
        if state.is_parked:  # its lease on paper was lost with one of its devices
            state.device, state.others = device, instruction.devices[1:]
            return
        self._announce(state, device)
        if state.homes not in ((), instruction.devices):
            self.forget(state)
        state.is_new_there = state.parked_at != device
        if state.is_new_there:
            state.parked_at = ""
        state.device = state.home = device
        state.others = instruction.devices[1:]
        state.leases += 1
        state.until = state.before_halt(state.step + instruction.steps)
        age_s = time.monotonic() - state.saved_at
        wait_s = interval_s(self.settings.checkpoint_every_s, state.save_s)
        grant = Grant(
            job=state.job,
            layout=state.layout,
            progress=state.progress,
            until=state.until,
            restore=state.restore,
            save_in_s=max(0.0, wait_s - age_s),
            warm=state.warm,
            rule=self.rule,
        )
        self._send(grant, instruction.devices, state.descriptor)

    def _send(self, grant: Grant, devices: Sequence[str], descriptor: int) -> None:
        """A grant for each stage, with a socket to each of the others."""
        with ExitStack() as ours:
            ends: dict[tuple[int, int], int] = {}
            for one, other in combinations(range(len(devices)), 2):
                pair = socket.socketpair()
                for stages, end in zip(((one, other), (other, one)), pair, strict=True):
                    ends[stages] = ours.enter_context(end).fileno()
            for stage, device in enumerate(devices):
                links = [ends[stage, peer] for peer in range(len(devices)) if peer != stage]
                of_stage = replace(grant, stage=stage)
                self.pool.workers[device].send(of_stage, (descriptor, *links))

    def _has_region(self, state: TrialRun) -> bool:
        """Host memory for the trial; without room it waits until another trial ends."""
        if state.descriptor is not None:
            return True
        others = [other for other in self.states.values() if other.descriptor is not None]
        try:
            state.descriptor = self._make_region(state, others)
        except CapacityError as error:
            if others:
                self.do(leases.TrialEnded(state.job.trial))
                self._deferred.append(state)
            else:
                self.fail(state.job.trial, f"CapacityError: {error}")
            return False
        return True

    def _make_region(self, state: TrialRun, others: Sequence[TrialRun]) -> int:
        """Raises CapacityError where it does not fit beside the others."""
        if not self.fits_host([state.job, *(other.job for other in others)]):
            raise CapacityError(
                f"the state of trial {state.job.trial} takes "
                f"{format_bytes(state.job.host_bytes)} of the host's memory, which is more than "
                "host_memory= leaves. Give more, or train a smaller model."
            )
        name = f"{self.plan.study}-{state.job.trial}"
        return create_region(name, state.layout.num_bytes, self.plan.spill_dir)

    def forget(self, state: TrialRun) -> None:
        """Have the workers where the trial ran last let go of it."""
        self._forget_at(state.homes, state.job.trial)

    def forget_everywhere(self, state: TrialRun) -> None:
        """Have all workers let go of it: it may have run on more than those it ran on last."""
        self._forget_at(tuple(self.pool.workers), state.job.trial)

    def forget_others(self, state: TrialRun) -> None:
        """Have its later stages' workers let go of it; the first one's has all there is."""
        self._forget_at(state.others, state.job.trial)
        state.others = ()

    def _forget_at(self, homes: Sequence[str], trial: int) -> None:
        for worker in filter(None, map(self.pool.workers.get, homes)):
            self._unanswered[worker, trial] += 1
            worker.send(Stop(trial))

    def forgotten(self, worker: Worker, trial: int) -> None:
        """A worker has let go of a trial; what it says of it from now on is of a new stay."""
        self._unanswered[worker, trial] -= 1
        self._unanswered += Counter()  # keeps what is above 0

    def is_past(self, worker: Worker, trial: int | None) -> bool:
        """Whether what a worker says of a trial crossed a Stop on its way.

        The others of a gang do not know yet that one is gone. By the time that their words are
        read the trial may have the same devices again.
        """
        return trial is not None and (worker, trial) in self._unanswered

    def lost_worker(self, worker: Worker) -> None:
        """It will answer nothing any more."""
        for key in [key for key in self._unanswered if key[0] is worker]:
            del self._unanswered[key]

    def _announce(self, state: TrialRun, device: str) -> None:
        now, trial = time.time(), state.job.trial
        if not state.started:
            state.started = time.monotonic()
        if not state.has_run:
            state.has_run = True
            self.tell(events.TrialStarted(time=now, trial=trial, device=device))
        elif device != state.home and state.home:
            self.tell(events.TrialMoved(time=now, trial=trial, device=device, step=state.step))
        else:
            self.tell(events.TrialResumed(time=now, trial=trial, device=device, step=state.step))

    def lease_ended(self, state: TrialRun) -> None:
        """The trial left its device at a step boundary, and waits for the next lease."""
        device, state.device = state.device, ""
        self.do(leases.LeaseEnded(state.job.trial, device, state.steps_left))

    def leave(self, state: TrialRun) -> None:
        """The trial has no device and waits for none, until ``begin``."""
        state.device = ""
        self.do(leases.TrialEnded(state.job.trial))

    def end(self, state: TrialRun) -> None:
        """The trial has ended: its device and its memory are free."""
        self.open.discard(state.job.trial)
        self.forget(state)
        state.close()
        state.progress = None  # tens of KiB of random states and names
        waiting, self._deferred = self._deferred, []
        self.leave(state)
        self._deferred += waiting
        self.begin_deferred()

    def is_deferred(self, state: TrialRun) -> bool:
        """Whether it waits for room in the host's memory."""
        return any(other is state for other in self._deferred)

    @property
    def has_deferred(self) -> bool:
        """Whether trials wait for room in the host's memory."""
        return bool(self._deferred)

    def begin_deferred(self) -> None:
        """There may be room on the host now: as many begin of those that wait for it as fit."""
        waiting, self._deferred = self._deferred, []
        there = [state.job for state in self.states.values() if state.descriptor is not None]
        least = math.inf  # bytes for which there is no room any more
        for state in waiting:
            job = state.job
            if job.trial not in self.open:
                continue
            if there and (job.host_bytes >= least or not self.fits_host([job, *there])):
                least = min(least, job.host_bytes)
                self._deferred.append(state)
            else:
                there.append(job)
                self.begin(state)


def _lane(job: Job) -> tuple[str, int] | None:
    return (job.array.group, job.array.slot) if job.array else None
