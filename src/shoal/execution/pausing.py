"""Bringing trials to rest: parked at a step boundary, then saved.

One trial is brought to rest to be stopped or cloned, all of them to pause or to end the run.
The worker parks; whoever is ahead of its newest generation is written; then what was waiting
for that is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.core import event as events
from shoal.execution.floor import Floor
from shoal.execution.trial import TrialRun
from shoal.runtime.wire.messages import Park, Save, Saved
from shoal.scheduler import leases


@dataclass(slots=True)
class _Rest:
    """All trials on their way to rest."""

    reason: str
    is_final: bool = False
    deadline: float = 0.0  # on the monotonic clock; for a final one
    saving: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    is_complete: bool = False


class Pausing:
    """Parks and saves; one thread's."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._rest: _Rest | None = None
        self.unsaved: dict[int, str] = {}  # trial -> why its last steps are not on disk

    @property
    def state(self) -> str:
        """What a status line says: running, pausing, paused or stopping."""
        if self._rest is None:
            return "running"
        if self._rest.is_final:
            return "stopping"
        return "paused" if self._rest.is_complete else "pausing"

    @property
    def is_over(self) -> bool:
        """Whether the run was told to end, and all is saved or the time is up."""
        rest = self._rest
        if rest is None or not rest.is_final:
            return False
        return rest.is_complete or time.monotonic() > rest.deadline

    # -- all trials -----------------------------------------------------------------------

    def pause(self, reason: str) -> None:
        """Bring all trials to rest until ``proceed``."""
        if self._rest is None:
            self._park_all(_Rest(reason))

    def end(self, reason: str, grace_s: float) -> bool:
        """Bring all trials to rest for good; False when that is under way."""
        if self._rest is not None and self._rest.is_final:
            return False
        self._park_all(_Rest(reason, is_final=True, deadline=time.monotonic() + grace_s))
        return True

    def proceed(self) -> bool:
        """Go on after ``pause``; False when there is nothing to go on from."""
        if self._rest is None or self._rest.is_final:
            return False
        self._rest = None
        self._floor.tell(events.StudyContinued(time=time.time()))
        self._floor.do(leases.Released())
        return True

    def _park_all(self, rest: _Rest) -> None:
        self._rest = rest
        self._floor.do(leases.Held())
        for trial in self._floor.open:
            self._park(self._floor.states[trial])

    def tick(self) -> None:
        """When all are parked, save them; when all are saved, that is all."""
        rest = self._rest
        if rest is None or rest.is_complete:  # as after nearly every message
            return
        states = [self._floor.states[trial] for trial in self._floor.open]
        if any(state.device for state in states):
            return
        rest.saving &= self._floor.open
        for state in states:
            if state.is_dirty and state.job.trial not in rest.asked:
                rest.saving.add(state.job.trial)
                rest.asked.add(state.job.trial)
                self._save(state)
        if not rest.saving:
            rest.is_complete = True
            if not rest.is_final:
                self._floor.tell(events.StudyPaused(time=time.time(), reason=rest.reason))

    # -- one trial ------------------------------------------------------------------------

    def save_then(self, state: TrialRun, work: Callable[[], None]) -> None:
        """Have the trial's state on disk, as far as can be, and then do ``work``.

        It stays parked until then; if it is open afterwards, it goes on.
        """
        state.after_save.append(work)
        if state.device and not state.is_parked:
            self._park(state)
        else:
            self._save(state)

    def parked(self, state: TrialRun) -> None:
        """The trial came to a step boundary, or never began, and its device let go of it."""
        if state.after_save:
            state.is_parked = True  # leased on paper, so that nobody grants it meanwhile
            self._save(state)
        else:
            self._floor.lease_ended(state)

    def saved(self, reply: Saved) -> None:
        """The trial's newest generation is of that step."""
        state = self._floor.states[reply.trial]
        if reply.trouble and self._floor.release_reserve():
            self._save(state)
        else:
            self._settle(state, reply.trouble)

    def lost(self, state: TrialRun) -> None:
        """Its worker died: what waits for its state takes the newest generation there is."""
        self._settle(state, "its worker died before it was written." if state.is_dirty else "")

    def give_up(self) -> None:
        """The time to come to rest is over: note who is not saved, and end their workers."""
        for trial in self._floor.open:
            state = self._floor.states[trial]
            if state.device or state.is_dirty:
                self.unsaved.setdefault(trial, "the time to save it was over.")
            for device in state.devices:
                self._floor.pool.drop(device)

    def _settle(self, state: TrialRun, trouble: str) -> None:
        trial = state.job.trial
        self.unsaved.pop(trial, None)
        if trouble:
            self.unsaved[trial] = f"it is saved at step {state.saved_step}: {trouble}"
        if self._rest is not None:
            self._rest.saving.discard(trial)
        self.release(state)

    def release(self, state: TrialRun) -> None:
        """Do what was waiting for the trial's state, and let it go on."""
        works, state.after_save = state.after_save, []
        for work in works:
            work()
        if state.is_parked:
            state.is_parked = False
            if state.job.trial in self._floor.open and state.device:
                self._floor.lease_ended(state)

    def _park(self, state: TrialRun) -> None:
        worker = self._floor.pool.workers.get(state.device)
        if worker is not None:
            worker.send(Park(state.job.trial))

    def _save(self, state: TrialRun) -> None:
        worker = self._floor.pool.workers.get(state.parked_at)
        if state.is_dirty and worker is not None:
            worker.send(Save(state.job.trial))
        else:
            self._settle(state, "no worker has it." if state.is_dirty else "")
