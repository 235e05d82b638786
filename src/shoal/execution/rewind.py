"""Back to the newest generation: what becomes of a trial whose region may hold half a step."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from shoal.core import event as events
from shoal.core.plan import alone, seated_at, with_seats
from shoal.core.seats import base_of, rebased
from shoal.core.studyfiles import generation_name
from shoal.execution.floor import Floor
from shoal.execution.trial import TrialRun
from shoal.runtime import checkpoint


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
    later = [epoch.step for epoch in state.seats if epoch.step > state.step]
    if later and (state.job.array or state.job.began):
        state.halt = min(later)


def damaged(floor: Floor, trial: int, path: Path, why: str) -> None:
    """Say that a generation cannot be trusted."""
    where = generation_name(trial, path.name)
    floor.tell(events.CheckpointDamaged(time=time.time(), trial=trial, path=where, reason=why))


def leave_array(floor: Floor, state: TrialRun, reason: str) -> None:
    """The trial trains alone from its newest generation on; its numerics key says since when."""
    state.seats = ()
    state.rejob(alone(state.job, state.step, reason), state.layout)
    floor.tell_replanned(state.job, state.step, reason)
