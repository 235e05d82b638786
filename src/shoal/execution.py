"""One run of a planned study: leases out, events in, until every trial has ended.

The study's process never touches a kernel. It owns the trials' host regions, turns the
workers' replies into events for the sinks and for the lease machine, and does what the
machine says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core import event as events
from shoal.core.errors import CapacityError, WorkerError
from shoal.core.plan import Job, Plan, Spilled
from shoal.core.spec import TrialSpec
from shoal.memory.layout import TrialLayout
from shoal.memory.store import create_region
from shoal.planning import Planned
from shoal.runtime import checkpoint
from shoal.runtime.messages import (
    Broken,
    Extend,
    Grant,
    Happened,
    LeaseOver,
    Progress,
    Refused,
    Settings,
    Stop,
)
from shoal.runtime.pool import Gone, Worker, WorkerPool
from shoal.scheduler import leases
from shoal.scheduler.policy import LongestRemainingFirst

LEASE_S = 2.0
MAX_DEATHS = 3
"""A trial whose code was running when its worker died this often is FAILED."""

Sink = Callable[[Sequence[events.Event]], None]


@dataclass(slots=True)
class _State:
    """A trial as the run sees it."""

    job: Job
    layout: TrialLayout
    total: int | None  # steps, where known
    step: int = 0
    until: int = 0
    device: str = ""  # that has it leased now
    home: str = ""  # where it ran last
    descriptor: int | None = None
    progress: Progress | None = None
    restore: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    deaths: int = 0
    started: float = 0.0

    @property
    def steps_left(self) -> int | None:
        return None if self.total is None else self.total - self.step


class Execution:
    """Runs a plan on a configured pool; ``run`` returns (finished, failed)."""

    def __init__(
        self,
        planned: Planned,
        pool: WorkerPool,
        recipe: bytes,
        settings: Settings,
        sink: Sink,
    ) -> None:
        self._plan: Plan = planned.plan
        self._pool, self._recipe, self._settings = pool, recipe, settings
        self._write = sink
        self._happened: list[events.Event] = []
        self._leases = leases.Leases(
            LongestRemainingFirst(), active=planned.plan.active, lease_s=LEASE_S
        )
        self._states = {
            job.trial: _State(
                job=job,
                layout=planned.layouts[job.trial],
                total=_total_steps(settings, planned.num_batches[job.trial], job.micro_batches),
            )
            for job in planned.plan.jobs
        }
        self._open = set(self._states)
        self._finished, self._failed = 0, len(planned.failures)
        for trial, error in planned.failures.items():
            self._sink(events.TrialFailed(time=time.time(), trial=trial, step=0, error=error))

    def run(self) -> tuple[int, int]:
        """Until every trial has finished or failed. Host regions are given back."""
        try:
            for device in self._plan.devices:
                self._do(leases.DeviceJoined(device.name))
            for state in self._states.values():
                self._do(self._added(state))
            while self._open:
                received = self._pool.receive(timeout=5.0)
                if received is None:
                    self._pool.check_alive()
                    continue
                self._take(*received)
                self._flush()
        finally:
            self._flush()
            for state in self._states.values():
                _close(state)
        return self._finished, self._failed

    def _sink(self, event: events.Event) -> None:
        self._happened.append(event)

    def _flush(self) -> None:
        """Write what a message brought, in one go."""
        happened, self._happened = self._happened, []
        if happened:
            self._write(happened)

    # -- replies ------------------------------------------------------------------------

    def _take(self, worker: Worker, reply: object) -> None:
        match reply:
            case Happened():
                for event in reply.events:
                    self._take_event(event)
            case LeaseOver():
                self._lease_over(worker, reply)
            case Refused():
                self._trial_failed(reply.trial, reply.error)
            case Gone():
                self._worker_gone(worker, reply.reason)
            case Broken():
                worker.last_words = reply.error  # its end arrives next

    def _take_event(self, event: events.Event) -> None:
        if isinstance(event, events.StepFinished):
            self._step_finished(event)
            return
        if isinstance(event, events.Evaluated):
            self._states[event.trial].metrics = event.metrics
        self._sink(event)

    def _step_finished(self, event: events.StepFinished) -> None:
        state = self._states[event.trial]
        state.step = event.step
        if state.total is None and self._settings.epochs and event.steps_per_epoch:
            state.total = self._settings.epochs * event.steps_per_epoch
        self._sink(event)
        if event.trial in self._open and state.device == event.device:
            self._do(
                leases.StepFinished(event.trial, event.device, event.seconds, state.steps_left)
            )

    def _lease_over(self, worker: Worker, reply: LeaseOver) -> None:
        state = self._states[reply.trial]
        if reply.trial not in self._open:
            return
        state.progress, state.step, state.restore = reply.progress, reply.progress.step, ""
        if reply.ended:
            self._trial_finished(state)
            return
        if state.steps_left == 0:
            self._trial_failed(
                reply.trial,
                f"TrialError: the trial ran {state.step} steps, all that its data promised, and "
                "its data goes on. Let __len__ of the training data be its number of batches.",
            )
            return
        device, state.device = state.device, ""
        self._sink(events.TrialParked(time=time.time(), trial=reply.trial, step=state.step))
        self._do(leases.LeaseEnded(reply.trial, device, state.steps_left))

    def _trial_finished(self, state: _State) -> None:
        trial = state.job.trial
        path = checkpoint.latest(self._settings.directory, trial)
        assert path is not None
        self._finished += 1
        self._sink(
            events.TrialFinished(
                time=time.time(),
                trial=trial,
                step=state.step,
                metrics=dict(state.metrics),
                checkpoint=str(path.relative_to(self._settings.directory)),
                seconds=time.time() - state.started,
            )
        )
        self._end(state)

    def _trial_failed(self, trial: int, error: str) -> None:
        if trial not in self._open:
            return
        state = self._states[trial]
        self._failed += 1
        self._sink(events.TrialFailed(time=time.time(), trial=trial, step=state.step, error=error))
        self._end(state)

    def _end(self, state: _State) -> None:
        self._open.discard(state.job.trial)
        state.device = ""
        _close(state)
        self._do(leases.TrialEnded(state.job.trial))

    def _worker_gone(self, worker: Worker, reason: str) -> None:
        """Replace a dead worker; its trials go on from their last saved state."""
        device = worker.device
        if device is None:
            return
        held = [
            state
            for trial, state in self._states.items()
            if trial in self._open and state.device == device.name
        ]
        words = f"{reason}\n{worker.last_words}".strip()
        self._sink(
            events.WorkerDied(
                time=time.time(),
                device=device.name,
                pid=worker.pid,
                reason=words,
                trials=tuple(state.job.trial for state in held),
            )
        )
        for state in held:
            running = worker.running
            self._fall_back(state, blamed=not running or state.job.trial in running)
        # With no step left a trial still has to evaluate and be saved: one more lease.
        left = {state.job.trial: state.steps_left or None for state in held}
        self._pool.replace(device, self._recipe, self._settings)
        instructions = self._leases.handle(leases.DeviceLost(device.name, left))
        instructions += self._leases.handle(leases.DeviceJoined(device.name))
        for state in held:
            if state.deaths >= MAX_DEATHS:
                self._trial_failed(
                    state.job.trial,
                    f"{WorkerError.__name__}: the worker died {state.deaths} times while it ran "
                    f"this trial, last: {words}",
                )
        for instruction in instructions:
            self._obey(instruction)

    def _fall_back(self, state: _State, *, blamed: bool) -> None:
        """The trial's region may hold half a step: start from the last checkpoint, or anew.

        ``blamed``: its code was running when the worker died, or nobody knows whose.
        """
        trial = state.job.trial
        saved = checkpoint.latest(self._settings.directory, trial)
        state.deaths += blamed
        state.device, state.home, state.progress = "", "", None
        state.restore = str(saved) if saved else ""
        state.step = int(saved.name.removeprefix("step-")) if saved else 0
        state.until = 0
        self._sink(events.TrialRestarted(time=time.time(), trial=trial, step=state.step))

    # -- leases -------------------------------------------------------------------------

    def _added(self, state: _State) -> leases.TrialAdded:
        job = state.job
        moved = sum(s.owned_bytes + s.state_bytes for s in job.shards)
        return leases.TrialAdded(
            job.trial,
            state.steps_left,
            step_s=max(float(job.step_s), 1e-6),
            switch_s=moved / 1e9 + float(job.step_s),
        )

    def _do(self, event: leases.Event) -> None:
        for instruction in self._leases.handle(event):
            self._obey(instruction)

    def _obey(self, instruction: leases.Instruction) -> None:
        state = self._states[instruction.trial]
        if instruction.trial not in self._open:
            return
        worker = self._pool.workers[instruction.device]
        if isinstance(instruction, leases.ExtendLease):
            state.until += instruction.steps
            worker.send(Extend(instruction.trial, state.until))
            return
        if state.descriptor is None:
            try:
                state.descriptor = create_region(
                    f"{self._plan.study}-{instruction.trial}", state.layout.num_bytes
                )
            except CapacityError as error:
                self._trial_failed(instruction.trial, f"CapacityError: {error}")
                return
        self._announce(state, instruction.device)
        if state.home not in ("", instruction.device) and state.home in self._pool.workers:
            self._pool.workers[state.home].send(Stop(instruction.trial))  # it forgets the trial
        state.device = state.home = instruction.device
        state.until = state.step + instruction.steps
        grant = Grant(
            job=state.job,
            layout=state.layout,
            progress=state.progress,
            until=state.until,
            restore=state.restore,
        )
        worker.send(grant, (state.descriptor,))

    def _announce(self, state: _State, device: str) -> None:
        now, trial = time.time(), state.job.trial
        if not state.started:
            state.started = now
            self._sink(events.TrialStarted(time=now, trial=trial, device=device))
        elif device != state.home:
            self._sink(events.TrialMoved(time=now, trial=trial, device=device, step=state.step))
        else:
            self._sink(events.TrialResumed(time=now, trial=trial, device=device, step=state.step))


def planned_events(
    planned: Planned, trials: Iterable[TrialSpec], totals: Mapping[int, int | None]
) -> list[events.Event]:
    """One TrialPlanned for each trial, also for those that cannot be built."""
    jobs = {job.trial: job for job in planned.plan.jobs}
    return [_planned(trial, jobs.get(trial.number), totals) for trial in trials]


def _planned(
    trial: TrialSpec, job: Job | None, totals: Mapping[int, int | None]
) -> events.TrialPlanned:
    spilled = job is not None and isinstance(job.technique, Spilled)
    return events.TrialPlanned(
        time=time.time(),
        trial=trial.number,
        hp=dict(trial.hp),
        seed=trial.seed,
        technique=type(job.technique).__name__ if job else "",
        shards=len(job.shards) if job and spilled else 1,
        steps=totals.get(trial.number),
        peak_bytes=job.peak_bytes if job else 0,
        numerics=dict(job.numerics) if job else {},
    )


def predict_seconds(plan: Plan, totals: Mapping[int, int | None]) -> float:
    """A bound on the study's duration: its work over its devices, or its longest trial."""
    work = [float(job.step_s) * (totals[job.trial] or 0) for job in plan.jobs]
    return max(sum(work) / max(1, len(plan.devices)), max(work, default=0.0))


def total_steps(planned: Planned, settings: Settings) -> dict[int, int | None]:
    """The steps of each trial, where they are known before it runs."""
    return {
        job.trial: _total_steps(settings, planned.num_batches[job.trial], job.micro_batches)
        for job in planned.plan.jobs
    }


def _total_steps(settings: Settings, num_batches: int | None, accumulate: int) -> int | None:
    if settings.steps is not None:
        return settings.steps
    if num_batches is None or settings.epochs is None:
        return None
    return settings.epochs * -(-num_batches // accumulate)


def _close(state: _State) -> None:
    if state.descriptor is not None:
        os.close(state.descriptor)
        state.descriptor = None
