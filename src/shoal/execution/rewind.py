"""Back to the newest generation: what becomes of a trial whose region may hold half a step.

[Note: leaving an array]
A trial that its array cannot train any further (code of its own froze parameters, memory lacks)
leaves it for good, after the last step that the array did. It goes there once more from its
newest generation, so that its bits do not depend on when that was written:

    saved at 5 | steps 6, 7 in the array, 8 fails
                 steps 6, 7 in the array, saved | 8, 9, ... alone
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from shoal.core import event as events
from shoal.core.plan import seated, seated_at, with_seats
from shoal.core.seats import ALONE, Epoch, base_of, rebased, until, with_epoch
from shoal.core.studyfiles import generation_name
from shoal.execution.floor import Floor
from shoal.execution.trial import TrialRun
from shoal.runtime.saving import checkpoint


def fall_back(floor: Floor, state: TrialRun, reason: str) -> None:
    """Have the trial start from its newest generation, or anew; it has left its device."""
    trial, directory = state.job.trial, floor.settings.directory
    saved = checkpoint.latest(directory, trial, lambda path, why: damaged(floor, trial, path, why))
    state.device = ""
    state.leave_home()
    if state.job.gang > 1:
        state.close()  # a stage that has yet to hear of it may still write to the old region
    state.progress, state.until, state.is_parked = None, 0, False
    state.restore = str(saved.path) if saved else ""
    state.warm = saved is not None and checkpoint.is_warm(saved, trial)
    state.step = state.saved_step = saved.step if saved else 0
    state.saved_path = str(saved.path.relative_to(directory)) if saved else ""
    _disinherit(state)
    _unseat(floor, state)
    floor.tell(
        events.TrialRestarted(time=time.time(), trial=trial, step=state.step, reason=reason)
    )


def _disinherit(state: TrialRun) -> None:
    """Where it is before a state that it took over, it has to take that over again."""
    state.inherited_at = state.step if state.warm else -1
    if (lost := state.lost_step) is not None:
        state.job = replace(state.job, hp=state.inherits[lost].before)
        state.halt = lost


def _unseat(floor: Floor, state: TrialRun) -> None:
    """Where it is before it got a seat, it is in the one that it had, and gets the other again.

    One that was asked for it has from here on.
    """
    state.job = seated_at(state.job, state.step)
    if (seats := rebased(state.seats, state.step)) != state.seats:
        state.seats = seats
        known = replace(state.job, numerics=with_seats(state.job.numerics, seats))
        floor.tell_replanned(known, state.step, f"a seat that was asked for: {base_of(seats)}")
    if not (state.job.array or state.job.began):
        if until(state.seats, state.step) != state.seats:
            leave_array(floor, state, state.step, "its array is not there any more")
        return
    later = [e.step for e in state.seats if e.step > state.step and not e.for_good]
    if later:
        state.halt = min(later)


def damaged(floor: Floor, trial: int, path: Path, why: str) -> None:
    """Say that a generation cannot be trusted."""
    where = generation_name(trial, path.name)
    floor.tell(events.CheckpointDamaged(time=time.time(), trial=trial, path=where, reason=why))


def leave_array(floor: Floor, state: TrialRun, step: int, reason: str) -> None:
    """The trial trains alone from ``step`` on; its numerics key says so.

    It has fallen back, and has to come there again in its array first: how many of its steps are
    an array's does not depend on when it was saved. One that has left it already stays as it is.
    """
    if state.job.array is None and any(epoch.for_good for epoch in until(state.seats, state.step)):
        return
    epochs = with_epoch(state.seats, Epoch(max(step, state.step), 0, ALONE, for_good=True))
    state.seats = epochs
    left = replace(state.job, why=(*state.job.why, reason))
    if left.array or left.began:
        left = seated(left, epochs)
    else:
        left = replace(left, numerics=with_seats(left.numerics, epochs))
    if state.step >= epochs[-1].step:
        state.rejob(left, state.layout)
    floor.tell_replanned(left, epochs[-1].step, reason)


def leave_now(floor: Floor, state: TrialRun) -> None:
    """A trial that came to the step at which it leaves its array has the job that it has alone.

    It is on no device; all of it is in its region.
    """
    floor.forget(state)
    state.leave_home()
    state.job = seated(state.job, state.seats)
