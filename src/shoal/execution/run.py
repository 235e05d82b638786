"""One run of a planned study: leases out, events in, until every trial has ended.

The study's process never touches a kernel. It owns the trials' host regions, turns the
workers' replies into events for the sinks and for the lease machine, and does what the
machine says. It ends early, with everything saved that can be, when it is told to stop,
when the disk is full, and when every trial fails in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.core import event as events
from shoal.core.errors import ShoalError, StorageError
from shoal.core.plan import Job, Plan, seated_at
from shoal.core.seats import epochs_of, rebased
from shoal.core.spec import TrialSpec
from shoal.core.studyfiles import generation_name
from shoal.core.units import counted
from shoal.execution.endings import Endings
from shoal.execution.failures import SameEnds, SameFailures
from shoal.execution.floor import Floor, Sink, Tally
from shoal.execution.hunt import Hunt
from shoal.execution.pausing import Pausing
from shoal.execution.recovery import Recovery
from shoal.execution.replanning import Replanning
from shoal.execution.rewind import leave_now
from shoal.execution.rungs import check_moments
from shoal.execution.searching import Searching
from shoal.execution.trial import Start, TrialRun, total_steps
from shoal.execution.watchdog import Backoff, Watchdog
from shoal.planning import Abandoned, Planned, Planner
from shoal.runtime.pool import Gone, Worker, WorkerPool
from shoal.runtime.saving.saver import interval_s
from shoal.runtime.wire.messages import (
    Broken,
    Described,
    Forgotten,
    Happened,
    LeaseOver,
    Measured,
    MeasuredArray,
    MeasuredArrayShards,
    Refused,
    Returned,
    Saved,
    Settings,
    TimedArray,
)
from shoal.scheduler import leases

PATIENCE = 4
"""Intervals without a good generation before a full disk stops the study."""
_WAIT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to give up, and how; and when to say that something takes long."""

    retries: int = 0
    time_limit_s: float | None = None  # of this run
    trial_time_limit_s: float | None = None  # of a trial on its devices
    grace_s: float = 30.0
    slow_s: float = 60.0  # of an order while the study is planned: then somebody is told
    watchdog: Watchdog = field(default_factory=Watchdog)
    backoff: Backoff = field(default_factory=Backoff)
    same_failures: SameFailures = field(default_factory=SameFailures)
    same_ends: SameEnds = field(default_factory=SameEnds)


class Execution:
    """Runs a plan on a configured pool.

    Args:
        planner: Measures again what turns out not to fit, and trials that come later.
        sink: Called with the events of each message; a StorageError of it stops the run.
        starts: Where trials begin that ran before.
        release_reserve: Gives back disk space that was kept for the end; True if there was some.
        hunt: The search that decides which trials come, and which go on; None without one.
        fits_host: Whether the states of these jobs may be in the host's memory at a time.
    """

    def __init__(
        self,
        planned: Planned,
        pool: WorkerPool,
        planner: Planner,
        settings: Settings,
        sink: Sink,
        *,
        starts: Mapping[int, Start] | None = None,
        limits: Limits | None = None,
        release_reserve: Callable[[], bool] = lambda: False,
        hunt: Hunt | None = None,
        fits_host: Callable[[Sequence[Job]], bool] = lambda jobs: True,
    ) -> None:
        self._pool, self._settings = pool, settings
        self._limits = limits = limits or Limits()
        self._floor = Floor(planned.plan, pool, settings, sink, release_reserve)
        self._floor.fits_host = fits_host
        self._floor.on_full = lambda error: self.stop(f"the disk is full: {error}", error)
        self._pausing = Pausing(self._floor)
        self._endings = Endings(self._floor, self._pausing, limits.same_failures, self.stop)
        self._replanning = Replanning(
            self._floor, planner, self._receive_for_planner, lambda: self.state == "stopping"
        )
        self._recovery = Recovery(
            self._floor,
            self._pausing,
            self._replanning,
            retries=limits.retries,
            watchdog=limits.watchdog,
            backoff=limits.backoff,
            same_ends=limits.same_ends,
            give_up=self.stop,
        )
        self._searching = Searching(
            hunt or Hunt(), self._floor, self._pausing, self._endings, settings, self.stop
        )
        self._began = time.monotonic()
        self._later: list[Callable[[], None]] = []  # what waits until a plan is made
        self._leaving: dict[int, bool] = {}  # by trial whether it was to be saved
        self._enroll(planned, starts or {})
        for trial, error in planned.failures.items():
            self._endings.never_began(trial, error)

    def _enroll(self, planned: Planned, starts: Mapping[int, Start]) -> None:
        for job in planned.plan.jobs:
            trial, start = job.trial, starts.get(job.trial, Start())
            total = total_steps(self._settings, planned.num_batches[trial], job.micro_batches)
            self._floor.open.add(trial)
            self._floor.states[trial] = TrialRun(
                job=seated_at(job, start.step),
                seats=rebased(epochs_of(job.numerics), start.step),
                layout=planned.layouts[trial],
                total=total,
                step=start.step,
                restore=start.restore,
                warm=start.warm,
                metrics=start.metrics,
                has_run=start.has_run,
                device_s=start.device_s,
                saved_step=start.step,
                saved_path=generation_name(trial, Path(start.restore).name)
                if start.restore
                else "",
            )
            self._searching.enroll(self._floor.states[trial], planned.num_batches[trial])
        self._searching.set_halts(job.trial for job in planned.plan.jobs)

    def run(self) -> Tally:
        """Until every trial has ended, or the run is stopped. Host regions are given back."""
        floor = self._floor
        try:
            for device in floor.plan.devices:
                floor.do(leases.DeviceJoined(device.name))
            for trial in sorted(floor.open):
                floor.begin(floor.states[trial])
            while (floor.open or self._searching.is_asking) and not self._pausing.is_over:
                floor.flush()
                self._receive()
                self._tick()
        finally:
            self._pausing.give_up()
            floor.flush()
            for state in floor.states.values():
                state.close()
        return floor.tally

    # -- what the outside asks ------------------------------------------------------------

    def stop(
        self, reason: str, error: ShoalError | None = None, grace_s: float | None = None
    ) -> None:
        """Park and save every trial, then end the run; a second call changes nothing."""
        if self._pausing.end(reason, self._limits.grace_s if grace_s is None else grace_s):
            self._floor.tally.reason, self._floor.tally.error = reason, error

    def pause(self, reason: str) -> None:
        """Park and save every trial, and wait for ``proceed``."""
        self._pausing.pause(reason)

    def proceed(self) -> bool:
        """Go on after ``pause``; False when it is not paused."""
        return self._pausing.proceed()

    @property
    def first_plan(self) -> Plan:
        """The plan that the run began with."""
        return self._floor.plan

    @property
    def state(self) -> str:
        """What a status line says: running, pausing, paused or stopping."""
        return self._pausing.state

    @property
    def unsaved(self) -> Mapping[int, str]:
        """Trials that have not ended and whose last steps are not on disk, and why."""
        states, unsaved = self._floor.states, self._pausing.unsaved
        ahead = {t for t in self._floor.open if states[t].is_dirty or states[t].device}
        return {trial: why for trial, why in unsaved.items() if trial in ahead}

    def trial(self, number: int) -> TrialRun | None:
        """A trial of this run that has not ended."""
        return self._floor.states[number] if number in self._floor.open else None

    def stop_trial(
        self, trial: int, reason: str, done: Callable[[bool], None] = lambda is_stopped: None
    ) -> None:
        """End one trial at its next step boundary; its state is saved, then ``done`` called.

        ``done`` hears whether it was stopped: it may have ended by itself before that.
        """
        state = self._floor.states[trial]

        def end() -> None:
            is_open = trial in self._floor.open
            if is_open:
                self._endings.stopped(state, reason)
            done(is_open)

        self._pausing.save_then(state, end)

    def when_free(self, work: Callable[[], None]) -> None:
        """Do ``work`` now, or once the plan that is being made is there: it may plan itself."""
        if self._replanning.is_busy:
            self._later.append(work)
        else:
            work()

    def save_then(self, trial: int, work: Callable[[], None]) -> None:
        """Have the trial's state on disk, do ``work``; then the trial goes on."""
        self._pausing.save_then(self._floor.states[trial], work)

    def plan(self, trials: Sequence[TrialSpec]) -> Planned:
        """Measure more trials while the others run.

        Raises:
            PlanError, SpecError, TrialError, WorkerError: they cannot run.
        """
        try:
            return self._replanning.plan(trials)
        finally:
            self._recovery.planned()

    def plan_points(self, trials: Sequence[TrialSpec]) -> Planned:
        """Measure trials that the study's search asks for, while the others run.

        Raises:
            PlanError, SpecError, TrialError, WorkerError: they cannot run, or not be pruned.
        """
        planned = self.plan(trials)
        if self._searching.prunes:
            check_moments(planned, self._settings)
        return planned

    def add(self, planned: Planned, starts: Mapping[int, Start]) -> None:
        """Run what ``plan`` planned beside the others."""
        self._enroll(planned, starts)
        self._floor.rule = planned.plan.rule
        for trial, error in planned.failures.items():
            self._endings.never_began(trial, error)
        for job in planned.plan.jobs:
            self._floor.begin(self._floor.states[job.trial])

    # -- the loop -------------------------------------------------------------------------

    def _receive(self) -> None:
        received = self._pool.receive(timeout=_WAIT_S)
        if received is None:
            return
        worker, reply = received
        if worker is None:
            reply()  # somebody outside asks
        else:
            self._take(worker, reply)

    def _tick(self) -> None:
        """What time alone brings, and what had to wait."""
        later, self._later = self._later, []
        for work in later:
            self.when_free(work)
        self._searching.tick()
        self._let_leave()
        if self._searching.is_asking and self.state == "running":
            self.when_free(self._searching.ask)
        self._keep_house()

    def _let_leave(self) -> None:
        """Have trials go on alone that stand where they leave their arrays and are saved."""
        for trial, is_saved in list(self._leaving.items()):
            state = self._floor.states[trial]
            if trial not in self._floor.open or not state.leaves_now:
                del self._leaving[trial]  # it ended, or lost what it had and will come here again
            elif state.device or state.after_save or self.state != "running":
                continue
            elif state.is_dirty and not is_saved:
                self._leaving[trial] = True  # as far as can be; its region is whole
                self._pausing.save_then(state, lambda: None)
            else:
                del self._leaving[trial]
                leave_now(self._floor, state)
                if state.is_halted:
                    self._searching.arrived(state)
                else:
                    self._floor.leave(state)
                    self._floor.begin(state)

    def _keep_house(self) -> None:
        self._recovery.tick()
        limit_s = self._limits.time_limit_s
        if limit_s is not None and time.monotonic() - self._began > limit_s:
            self.stop(f"the time limit of {limit_s:g} s is reached, planning not counted")
        self._pausing.tick()

    def _receive_for_planner(self) -> tuple[Worker, object] | None:
        """The next message; what is not the planner's is dealt with here."""
        self._floor.flush()
        self._keep_house()
        if self.state == "stopping":
            raise Abandoned("the study is being stopped: the plan was abandoned.")
        received = self._pool.receive(timeout=_WAIT_S)
        worker, reply = received or (None, lambda: None)
        if worker is None:
            reply()  # somebody outside asks
            return None
        if isinstance(reply, Refused) and self._floor.is_past(worker, reply.trial):
            return None  # another stage of the trial failed too
        measured = isinstance(reply, Refused) and reply.trial in self._replanning.trials
        if measured or isinstance(
            reply, Described | Measured | MeasuredArray | MeasuredArrayShards | TimedArray
        ):
            return worker, reply
        self._take(worker, reply)
        return (worker, reply) if isinstance(reply, Gone) else None

    # -- replies --------------------------------------------------------------------------

    def _take(self, worker: Worker, reply: object) -> None:
        match reply:
            case Happened():
                for event in reply.events:
                    self._take_event(worker, event)
            case Forgotten():
                self._floor.forgotten(worker, reply.trial)
            case Gone():
                self._recovery.worker_gone(worker, reply)
                self._floor.lost_worker(worker)
            case Broken():
                worker.last_words = reply.error  # its end arrives next
            case LeaseOver() | Returned() | Saved() | Refused():
                self._take_about(worker, reply)

    def _take_about(self, worker: Worker, reply: LeaseOver | Returned | Saved | Refused) -> None:
        """What a worker says of a trial counts while it has it, leased or parked."""
        if reply.trial not in self._floor.open or self._floor.is_past(worker, reply.trial):
            return
        state = self._floor.states[reply.trial]
        match reply:
            case Saved():
                places: tuple[str, ...] = (state.parked_at,)
            case Refused():
                places = state.devices
            case _:
                places = (state.device,)
        if worker not in map(self._pool.workers.get, places):
            return
        match reply:
            case LeaseOver():
                self._lease_over(state, reply)
            case Returned():
                self._floor.forget_others(state)  # they may have begun
                self._pausing.parked(state)
            case Saved():
                self._pausing.saved(reply)
            case Refused():
                lease = state.leases
                self.when_free(lambda: self._refused(reply, lease))

    def _refused(self, reply: Refused, lease: int) -> None:
        """A worker of it may have died, and the trial may have ended, while this waited."""
        state = self._floor.states[reply.trial]
        if reply.trial in self._floor.open and state.device and state.leases == lease:
            self._recovery.refused(reply)
            self._recovery.planned()

    def _take_event(self, worker: Worker, event: events.Event) -> None:
        if self._floor.is_past(worker, getattr(event, "trial", None)):
            self._floor.tell(event)  # it happened, and the trial will come there again
            return
        match event:
            case events.StepFinished():
                self._step_finished(event)
                return
            case events.Evaluated():
                self._floor.states[event.trial].metrics = event.metrics
            case events.CheckpointWritten():
                state = self._floor.states[event.trial]
                state.saved_step, state.saved_path = event.step, event.path
                state.saved_at, state.save_s = time.monotonic(), event.seconds
            case events.StorageFailed():
                self._storage_failed(event)
        self._floor.tell(event)

    def _step_finished(self, event: events.StepFinished) -> None:
        floor, state = self._floor, self._floor.states[event.trial]
        state.step, state.is_new_there = event.step, False
        state.device_s += event.seconds
        self._limits.same_failures.passed()
        self._limits.same_ends.passed()
        width = state.job.array.width if state.job.array else 1  # which step before work is seen
        for device in state.devices if event.device == state.device else (event.device,):
            self._limits.watchdog.step(device, event.seconds * width)
        if state.total is None and self._settings.epochs and event.steps_per_epoch:
            state.total = self._settings.epochs * event.steps_per_epoch
        floor.tell(event)
        if event.trial not in floor.open or state.device != event.device:
            return
        floor.do(leases.StepFinished(event.trial, event.device, event.seconds, state.steps_left))
        limit_s = self._limits.trial_time_limit_s
        if limit_s is not None and state.device_s > limit_s and not state.after_save:
            self.stop_trial(event.trial, f"its time limit of {limit_s:g} s is reached")

    def _lease_over(self, state: TrialRun, reply: LeaseOver) -> None:
        state.progress, state.step = reply.progress, reply.progress.step
        state.restore, state.warm, state.is_new_there = "", False, False
        state.parked_at = state.device
        if reply.ended:
            self._endings.last_step_done(state, reply)
        elif state.leaves_now:
            self._parked(state)
            self._leaving[state.job.trial] = False
        elif state.is_halted:
            self._wait_for_others(state)
        elif state.steps_left == 0:
            self._endings.failed(
                reply.trial,
                f"TrialError: the trial ran {counted(state.step, 'step')}, all that its data "
                "promised, and "
                "its data goes on. Let __len__ of the training data be its number of batches.",
            )
        else:
            self._parked(state)

    def _wait_for_others(self, state: TrialRun) -> None:
        """It stands at a rung, and goes on when its generation is decided there."""
        self._parked(state)
        self._searching.arrived(state)

    def _parked(self, state: TrialRun) -> None:
        now = time.time()
        self._floor.tell(events.TrialParked(time=now, trial=state.job.trial, step=state.step))
        self._pausing.parked(state)

    def _storage_failed(self, event: events.StorageFailed) -> None:
        """A trial may train on for a while without a new generation."""
        if event.trial is None or event.trial not in self._floor.open:
            return
        state = self._floor.states[event.trial]
        patience_s = PATIENCE * interval_s(self._settings.checkpoint_every_s, state.save_s)
        if time.monotonic() - state.saved_at > patience_s:
            error = StorageError(
                f"trial {event.trial} was last saved at step {state.saved_step} and is at step "
                f"{state.step}: {event.error} Then run the same command again: it goes on from "
                "there."
            )
            self._floor.release_reserve()
            self.stop(f"the state of trial {event.trial} cannot be saved", error)
