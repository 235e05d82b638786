"""Gangs that wait for a device that is gone go on over those that are there."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shoal.core import event as events
from shoal.core.errors import ShoalError
from shoal.core.spec import DeviceSpec
from shoal.execution.floor import Floor
from shoal.execution.pausing import Pausing
from shoal.execution.replanning import Replanning
from shoal.execution.rewind import fall_back
from shoal.execution.trial import TrialRun
from shoal.planning import Abandoned

AGAIN_S = 60.0
"""A trial that cannot do with what is there is tried again after this, should that change."""


class Ranks:
    """Has them closed. A trial is saved first if a worker has what no generation has yet."""

    def __init__(self, floor: Floor, pausing: Pausing, replanning: Replanning) -> None:
        self._floor, self._pausing, self._replanning = floor, pausing, replanning
        self._tried: dict[tuple[int, frozenset[str]], float] = {}
        self._asked_to_save: set[tuple[int, int]] = set()  # trials, and at which step

    def close(self, gone: frozenset[str]) -> bool:
        """Look for one trial that lacks a device and could do without; True if one was planned.

        The world may be another one afterwards: ask again.
        """
        there = [device for device in self._floor.plan.devices if device.name not in gone]
        if not gone or not there or self._replanning.is_busy or self._pausing.state != "running":
            return False
        for state in list(self._floor.states.values()):
            key, now = (state.job.trial, gone), time.monotonic()
            if not self._lacks(state, len(there)) or now < self._tried.get(key, now):
                continue
            if self._is_being_saved(state):
                continue
            self._tried[key] = now + AGAIN_S
            self._close_one(state, there, gone)
            return True
        return False

    def _lacks(self, state: TrialRun, devices: int) -> bool:
        """Whether it wants more devices than there are, and stands where it can be changed."""
        floor = self._floor
        wants = state.job.gang > devices and not state.is_halted
        stands = not (state.device or state.is_parked or state.after_save)
        return wants and stands and state.job.trial in floor.open and not floor.is_deferred(state)

    def _is_being_saved(self, state: TrialRun) -> bool:
        key = (state.job.trial, state.step)
        has_worker = state.parked_at in self._floor.pool.workers
        if not state.is_dirty or not has_worker or key in self._asked_to_save:
            return False
        self._asked_to_save.add(key)
        self._pausing.save_then(state, lambda: None)
        return bool(state.after_save)

    def _close_one(
        self, state: TrialRun, there: Sequence[DeviceSpec], gone: frozenset[str]
    ) -> None:
        names, trial = ", ".join(sorted(gone)), state.job.trial
        try:
            planned = self._replanning.over_fewer(state, there)
        except Abandoned:
            return
        except ShoalError as refusal:
            self._floor.tell(
                events.TrialWaits(
                    time=time.time(),
                    trial=trial,
                    step=state.step,
                    reason=f"no worker can begin on {names}, and trial {trial} takes "
                    f"{state.job.gang} devices: {refusal}",
                )
            )
            return
        if not self._lacks(state, len(there)):  # a device came back meanwhile, or it ended
            self._tried.pop((trial, gone), None)
            return
        self._floor.forget_everywhere(state)  # a worker may have its session, of the old job
        self._floor.leave(state)
        if state.has_run:
            fall_back(self._floor, state, f"no worker can begin on {names}")
        reason = f"{names} did not come back, {len(there)} are there"
        self._replanning.take_job(state, planned, reason)
