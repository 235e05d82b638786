"""What becomes of a trial whose worker died, that does not fit, or that raised."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from shoal.core import event as events
from shoal.core.errors import ShoalError, StorageError, WorkerError
from shoal.core.plan import Spilled
from shoal.core.spec import DeviceSpec, TrialSpec
from shoal.execution.failures import is_out_of_memory
from shoal.execution.floor import Floor
from shoal.execution.ladder import MAX_RUNGS, next_technique
from shoal.execution.pausing import Pausing
from shoal.execution.trial import TrialRun
from shoal.execution.watchdog import Backoff, Watchdog
from shoal.planning import Planned, Planner, Receive
from shoal.runtime import checkpoint
from shoal.runtime.messages import Refused
from shoal.runtime.pool import Worker
from shoal.scheduler import leases

MAX_DEATHS = 3
"""A trial whose code was running when its worker died this often is FAILED."""


class Recovery:
    """Brings trials and workers back.

    Args:
        planner: Measures again what did not fit.
        receive: Where the planner's answers come from while the run goes on.
        recipe: For the workers that replace dead ones.
    """

    def __init__(
        self,
        floor: Floor,
        pausing: Pausing,
        planner: Planner,
        receive: Receive,
        recipe: bytes,
        *,
        retries: int,
        watchdog: Watchdog,
        backoff: Backoff,
    ) -> None:
        self._floor, self._pausing, self._planner = floor, pausing, planner
        self._receive, self._recipe, self._retries = receive, recipe, retries
        self._watchdog, self._backoff = watchdog, backoff
        self._rejoin: dict[str, tuple[float, DeviceSpec]] = {}
        self.planning: set[int] = set()  # trials that are being measured now

    # -- trials ---------------------------------------------------------------------------

    def refused(self, reply: Refused) -> None:
        """A trial's own code raised, or it did not fit, or its generation is damaged."""
        state = self._floor.states[reply.trial]
        if isinstance(reply.cause, StorageError) and state.restore:
            self._damaged(reply.trial, Path(state.restore), str(reply.cause))
            self._start_over(state, f"its generation cannot be read: {reply.cause}")
        elif is_out_of_memory(reply.error):
            self._make_smaller(state, reply.error)
        elif state.failures < self._retries:
            state.failures += 1
            last = reply.error.strip().rpartition("\n")[2]
            self._start_over(state, f"retry {state.failures} of {self._retries} after {last}")
        else:
            self._floor.fail(reply.trial, reply.error)

    def _start_over(self, state: TrialRun, reason: str) -> None:
        """Leave the device and wait again, from the newest generation or anew."""
        self._floor.leave(state)
        self._fall_back(state, reason)
        self._floor.begin(state)

    def _fall_back(self, state: TrialRun, reason: str) -> None:
        """The trial's region may hold half a step: start from the newest generation, or anew."""
        trial, directory = state.job.trial, self._floor.settings.directory
        saved = checkpoint.latest(
            directory, trial, lambda path, why: self._damaged(trial, path, why)
        )
        state.device, state.home, state.progress, state.until = "", "", None, 0
        state.is_parked = False
        state.restore = str(saved.path) if saved else ""
        state.step = state.saved_step = saved.step if saved else 0
        state.saved_path = str(saved.path.relative_to(directory)) if saved else ""
        self._floor.tell(
            events.TrialRestarted(time=time.time(), trial=trial, step=state.step, reason=reason)
        )

    def _damaged(self, trial: int, path: Path, why: str) -> None:
        where = f"trials/{trial:04d}/{path.name}"
        self._floor.tell(
            events.CheckpointDamaged(time=time.time(), trial=trial, path=where, reason=why)
        )

    # -- memory ---------------------------------------------------------------------------

    def _make_smaller(self, state: TrialRun, error: str) -> None:
        """Give a trial that ran out of memory another job of the same bits, if there is one."""
        technique, shards = state.job.technique, len(state.job.shards)
        self._floor.leave(state)
        while state.rungs < MAX_RUNGS and state.job.trial in self._floor.open:
            state.rungs += 1
            technique = next_technique(technique, shards, state.place)
            shards = technique.shards or shards
            planned = self._planned_smaller(state, technique)
            if planned is not None:
                self._take_job(state, planned, error)
                return
        self._floor.fail(state.job.trial, error)

    def _planned_smaller(self, state: TrialRun, technique: Spilled) -> Planned | None:
        job = state.job
        spec = TrialSpec(number=job.trial, hp=job.hp, seed=job.seed)
        try:
            planned = self.plan(self._planner.forced(technique), [spec])
        except ShoalError:
            return None
        return None if planned.failures else planned

    def _take_job(self, state: TrialRun, planned: Planned, error: str) -> None:
        (job,) = planned.plan.jobs
        state.rejob(job, planned.layouts[job.trial])
        self._floor.tell(
            events.TrialReplanned(
                time=time.time(),
                trial=job.trial,
                step=state.step,
                reason=error.strip().rpartition("\n")[2],
                technique=type(job.technique).__name__,
                shards=len(job.shards) if isinstance(job.technique, Spilled) else 1,
                peak_bytes=job.peak_bytes,
            )
        )
        self._fall_back(state, "it ran out of memory, and was planned smaller")
        self._floor.begin(state)

    def plan(self, planner: Planner, trials: Sequence[TrialSpec]) -> Planned:
        """Plan while other trials run.

        Raises:
            PlanError, SpecError, WorkerError: they cannot be run.
        """
        if not self._floor.pool.workers:
            raise WorkerError("no worker is there to measure with; one will be, in a moment.")
        self.planning = {trial.number for trial in trials}
        try:
            return planner.plan(trials, receive=self._receive)
        finally:
            self.planning = set()

    # -- workers --------------------------------------------------------------------------

    def worker_gone(self, worker: Worker, reason: str) -> None:
        """A worker died; its trials go on from their last saved state."""
        floor, device = self._floor, worker.device
        if device is None:
            return
        words = f"{reason}\n{worker.last_words}".strip()
        lost = [s for t, s in floor.states.items() if t in floor.open and s.home == device.name]
        held = [state for state in lost if state.device]
        floor.tell(
            events.WorkerDied(
                time=time.time(),
                device=device.name,
                pid=worker.pid,
                reason=words,
                trials=tuple(state.job.trial for state in held),
            )
        )
        self._blame(worker, held, reason)
        self._watchdog.forget(device.name)
        floor.pool.drop(device.name)
        wait_s = self._backoff.died(device.name, time.monotonic())
        self._rejoin[device.name] = time.monotonic() + wait_s, device
        # With no step left a trial still has to evaluate and be saved: one more lease.
        left = {state.job.trial: state.steps_left or None for state in held}
        floor.lose_device(device.name, left)
        for state in held:
            if state.deaths >= MAX_DEATHS:
                floor.fail(
                    state.job.trial,
                    f"{WorkerError.__name__}: the worker died {state.deaths} times while it ran "
                    f"this trial, last: {words}",
                )
        for state in lost:
            self._pausing.release(state)

    def _blame(self, worker: Worker, held: Sequence[TrialRun], reason: str) -> None:
        """Whose code was running when it died; of all of them when nobody knows."""
        running = worker.running
        for state in held:
            state.deaths += not running or state.job.trial in running
            self._fall_back(state, f"its worker died: {reason}")

    def tick(self) -> None:
        """Replace dead workers when their time has come, and end those that hang."""
        now, floor = time.monotonic(), self._floor
        for name, (at, device) in list(self._rejoin.items()):
            if now >= at:
                del self._rejoin[name]
                floor.pool.replace(device, self._recipe, floor.settings)
                floor.do(leases.DeviceJoined(name))
        busy = {state.device for state in floor.states.values() if state.device}
        for name, worker in list(floor.pool.workers.items()):
            leased = name in busy and not self.planning
            still_s = self._watchdog.look(name, worker.work_done, now, leased=leased)
            if still_s is not None and worker.alive:
                self._end_hanging(worker, name, still_s)

    def _end_hanging(self, worker: Worker, name: str, still_s: float) -> None:
        worker.last_words = (
            f"it got nothing done for {still_s:.0f} s, {self._watchdog.limit_s(name):.0f} s are "
            f"allowed; its threads stood at:\n{worker.stacks()}"
        )
        self._watchdog.forget(name)
        worker.end()
