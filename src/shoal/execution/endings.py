"""How a trial ends: finished, stopped, pruned, or failed; and what many failures alike mean."""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal.core import event as events
from shoal.core.errors import ShoalError, StorageError, TrialError
from shoal.execution.failures import SameFailures
from shoal.execution.floor import Floor
from shoal.execution.pausing import Pausing
from shoal.execution.trial import TrialRun
from shoal.runtime.wire.messages import LeaseOver

Stop = Callable[[str, ShoalError], None]


class Endings:
    """Ends trials.

    Args:
        stop: Ends the run, with its reason and its error.
    """

    def __init__(
        self,
        floor: Floor,
        pausing: Pausing,
        same_failures: SameFailures,
        stop: Stop,
    ) -> None:
        self._floor, self._pausing, self._stop = floor, pausing, stop
        self._same_failures = same_failures
        floor.fail = self.failed

    def last_step_done(self, state: TrialRun, reply: LeaseOver) -> None:
        """A trial has finished once its last step is on disk."""
        if reply.checkpoint:
            state.saved_step, state.saved_path = state.step, reply.checkpoint
            self.finished(state)
        elif self._floor.release_reserve():
            state.is_parked = True
            self._pausing.save_then(state, lambda: self._last_step_done_again(state, reply))
        else:
            self._unsaved(state, reply.trouble)

    def _last_step_done_again(self, state: TrialRun, reply: LeaseOver) -> None:
        """The second attempt, in the room that the reserve left.

        If its worker died meanwhile, the trial waits for another one to do its last step.
        """
        if state.saved_step == reply.progress.step:
            self.finished(state)
        elif state.parked_at:
            self._unsaved(state, reply.trouble)

    def _unsaved(self, state: TrialRun, trouble: str) -> None:
        error = StorageError(
            f"trial {state.job.trial} did its last step, {state.step}, and cannot be saved: "
            f"{trouble} Its generation of step {state.saved_step} is intact: make room and run "
            "the same command again, and it goes on from there."
        )
        self._floor.leave(state)
        self._stop(f"the end of trial {state.job.trial} cannot be saved", error)

    def finished(self, state: TrialRun) -> None:
        """The trial did all its steps, and its state is on disk."""
        floor = self._floor
        floor.tally.finished += 1
        self._same_failures.passed()
        floor.tell(
            events.TrialFinished(
                time=time.time(),
                trial=state.job.trial,
                step=state.step,
                metrics=dict(state.metrics),
                checkpoint=state.saved_path,
                seconds=time.monotonic() - state.started,
            )
        )
        self._end(state)

    def stopped(self, state: TrialRun, reason: str) -> None:
        """The trial is ended by hand or by a limit, at its newest generation."""
        self._floor.tally.stopped += 1
        self._end_early(state, reason, events.TrialStopped, state.saved_step)

    def pruned(self, state: TrialRun, reason: str) -> None:
        """The trial is ended by the study's pruner; its state is on disk as far as can be."""
        self._floor.tally.pruned += 1
        self._same_failures.passed()
        self._end_early(state, reason, events.TrialPruned, state.step)

    def _end_early(
        self,
        state: TrialRun,
        reason: str,
        kind: type[events.TrialStopped] | type[events.TrialPruned],
        step: int,
    ) -> None:
        self._floor.tell(
            kind(
                time=time.time(),
                trial=state.job.trial,
                step=step,
                reason=reason,
                checkpoint=state.saved_path,
                metrics=dict(state.metrics),
                seconds=time.monotonic() - state.started if state.started else 0.0,
            )
        )
        self._end(state)

    def failed(self, trial: int, error: str) -> None:
        """The trial cannot go on; the others do, unless the first ones fail alike."""
        floor = self._floor
        if trial not in floor.open:
            return
        state = floor.states[trial]
        floor.tell(events.TrialFailed(time=time.time(), trial=trial, step=state.step, error=error))
        floor.tally.failed += 1
        self._end(state)
        self._check_alike(trial, error)

    def _end(self, state: TrialRun) -> None:
        """Whoever waits for its state hears of it too."""
        self._floor.end(state)
        self._pausing.release(state)

    def never_began(self, trial: int, error: str) -> None:
        """A trial cannot even be built."""
        self._floor.tally.failed += 1
        self._floor.tell(events.TrialFailed(time=time.time(), trial=trial, step=0, error=error))

    def _check_alike(self, trial: int, error: str) -> None:
        why = self._same_failures.failed(trial, error)
        if why and self._floor.open:
            self._stop("the first trials failed in the same way", TrialError(why))
