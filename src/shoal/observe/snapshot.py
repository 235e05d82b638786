"""The state that every screen and report draws, folded from the events.

[Note: folding]
``Folder`` is the mutable machine, ``Snapshot`` what it looks like at a moment. The
same events give the same snapshot however they are cut into batches: only the events'
own times are read, never a clock. A log can hold a step twice, once before a crash
and once after the resume; the later one replaces the earlier and all after it.

    events   S1 S2 S3 S4 (kill) StudyStarted TrialRestarted(step=2) S3 S4 S5
    losses   1  2  3  4                      1  2                   3  4  5

[Note: time]
A study's and a trial's ``seconds`` leave out the time between runs: the clock stands
still from the last event before a StudyStarted to that event.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.core.aim import Aim, metric_rank
from shoal.core.event import (
    ActionFinished,
    CheckpointDamaged,
    CheckpointWritten,
    EmulationMeasured,
    Evaluated,
    Event,
    LoaderRestarted,
    PeakMeasured,
    PlanningGoesOn,
    PlanningWaited,
    SamplerEnded,
    StateLeftOut,
    StepFinished,
    StorageFailed,
    StudyChanged,
    StudyContinued,
    StudyFinished,
    StudyPaused,
    StudyPlanned,
    StudyStarted,
    TrialExploited,
    TrialFailed,
    TrialFinished,
    TrialMoved,
    TrialParked,
    TrialPlanned,
    TrialPruned,
    TrialReplanned,
    TrialRestarted,
    TrialResumed,
    TrialStarted,
    TrialStopped,
    TrialWaits,
    WorkerDied,
    WorkerStalled,
    WorkerStarted,
    ended_words,
    left_out_words,
)
from shoal.core.profile import TOLERANCE
from shoal.observe.machines import DeviceFold, TrialFold, WorkFold
from shoal.observe.rows import DeviceRow, TrialRow, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A study at a moment. ``total`` counts trials that were not planned yet, too.

    ``emulated``: by device and stream how far an emulated one fell behind its profile's times, and
    those, in seconds.
    """

    study: str = ""
    metric: str = ""
    mode: str = "min"
    source: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    by_epochs: bool = False
    arguments: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    total: int = 0
    trials: tuple[TrialRow, ...] = ()
    devices: tuple[DeviceRow, ...] = ()
    started: float | None = None
    seconds: float = 0.0
    eta_seconds: float | None = None
    runs: int = 0
    waits: tuple[PlanningWaited, ...] = ()  # the newest of each device, while it is planned
    emulated: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # of its last run
    unfused: tuple[str, ...] = ()  # of its last run: why trials share no arrays, with how many
    part: float = 1.0  # of its steps that a trial does on average
    is_finished: bool = False
    is_paused: bool = False
    stopped: str = ""
    _folder: Any = field(
        default=None, compare=False, repr=False
    )  # the Folder's state, for ``folder``

    @staticmethod
    def of(events: Iterable[Event]) -> Snapshot:
        """The state after all of ``events``."""
        return Folder().add_all(events).last_snapshot()

    def folder(self) -> Folder:
        """What folds further events onto this state, a ``last_snapshot``, which stays as it is."""
        assert self._folder or not self.trials, "nothing goes on from what a screen draws"
        return self._folder.copy() if self._folder is not None else Folder()

    def count(self, state: TrialState) -> int:
        """How many trials are in ``state``; PENDING includes those not planned yet."""
        known = sum(row.state is state for row in self.trials)
        return known + (self.total - len(self.trials) if state is TrialState.PENDING else 0)

    @property
    def behind(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Streams that fell too far behind for what was measured to be the profile's."""
        return {
            place: seconds
            for place, seconds in self.emulated.items()
            if seconds[0] > TOLERANCE * seconds[1]
        }

    @property
    def steps_done(self) -> int:
        """Optimizer steps that count towards the trials' ends."""
        return sum(row.step for row in self.trials)

    @property
    def best(self) -> TrialRow | None:
        """The trial whose metric was best at some moment, running ones included."""
        rows = [row for row in self.trials if row.best is not None]
        return min(rows, key=lambda row: metric_rank(row.best, self.mode), default=None)

    def trial(self, number: int) -> TrialRow:
        """The row of a trial; a pending one if it was never mentioned."""
        for row in self.trials:
            if row.number == number:
                return row
        return TrialRow(number=number)


class Folder:
    """Folds events in place; a screen that follows a log keeps one."""

    def __init__(self) -> None:
        self._head = Snapshot()
        self._aim = Aim("", "min")
        self._trials: dict[int, TrialFold] = {}
        self._devices: dict[str, DeviceFold] = {}
        self._work = WorkFold()
        self._seconds = 0.0  # on the study's clock, which stands still between runs
        self._time: float | None = None

    def add_all(self, events: Iterable[Event]) -> Folder:
        """Fold a batch; returns itself."""
        for event in events:
            self.add(event)
        return self

    def add(self, event: Event) -> None:
        """Fold one event."""
        if not isinstance(event, ActionFinished):
            self._advance(event.time, runs=not isinstance(event, StudyStarted))
        _FOLDS[type(event)](self, event)

    def snapshot(self) -> Snapshot:
        """What the study looks like now."""
        trials = tuple(self._trials[number].row() for number in sorted(self._trials))
        running: dict[str, list[int]] = {}
        for row in trials:
            if row.state is TrialState.RUNNING:
                running.setdefault(row.device, []).append(row.number)
        devices = tuple(
            device.row(tuple(running.get(name, ())), self._work.seconds)
            for name, device in self._devices.items()
        )
        return replace(
            self._head,
            trials=trials,
            devices=devices,
            seconds=self._seconds,
            eta_seconds=_eta(self._head, trials, devices),
        )

    def last_snapshot(self) -> Snapshot:
        """The same where nothing more is folded here: others may go on from what it has."""
        return replace(self.snapshot(), _folder=self)

    def trial(self, number: int) -> TrialRow:
        """The row of a trial as of now, without looking at the others."""
        trial = self._trials.get(number)
        return TrialRow(number=number) if trial is None else trial.row()

    def copy(self) -> Folder:
        """A folder that goes its own way from here."""
        other = copy.copy(self)
        other._trials = {number: trial.copy() for number, trial in self._trials.items()}
        other._devices = {name: device.copy() for name, device in self._devices.items()}
        other._work = self._work.copy()
        return other

    def _advance(self, time: float, *, runs: bool) -> None:
        if self._time is None:
            self._time = time
        if runs:
            self._seconds += max(0.0, time - self._time)
        self._time = max(self._time, time)

    def _trial(self, number: int) -> TrialFold:
        trial = self._trials.get(number)
        if trial is None:
            trial = self._trials[number] = TrialFold(number)
        trial.cached = None
        if trial.began is not None and not trial.is_done:
            trial.seconds = self._seconds - trial.began
        return trial

    def _device(self, name: str) -> DeviceFold:
        return self._devices.setdefault(name, DeviceFold(name))

    def _study_started(self, event: StudyStarted) -> None:
        self._aim = Aim(event.metric, event.mode)
        self._work.begin(event.time)
        first = self._head.started
        self._head = replace(
            self._head,
            study=event.study,
            metric=event.metric,
            mode=event.mode,
            source=event.source,
            recipe=event.recipe,
            by_epochs=event.by_epochs,
            arguments=event.arguments,
            versions=event.versions,
            total=event.trials,
            started=event.time if first is None else first,
            runs=self._head.runs + 1,
            waits=(),
            warnings=(),
            unfused=(),
            is_finished=False,
            is_paused=False,
            stopped="",
        )
        for spec in event.devices:
            self._device(str(spec.get("name", ""))).describe(spec)
        for device in self._devices.values():
            device.recent.clear()
            device.stalled = None
        for trial in self._trials.values():
            trial.stand_still()

    def _planning_waited(self, event: PlanningWaited) -> None:
        self._wait_over(event.device)
        waits = sorted((*self._head.waits, event), key=lambda wait: wait.device)
        self._head = replace(self._head, waits=tuple(waits))

    def _wait_over(self, device: str) -> None:
        left = tuple(wait for wait in self._head.waits if wait.device != device)
        if len(left) < len(self._head.waits):
            self._head = replace(self._head, waits=left)

    def _study_planned(self, event: StudyPlanned) -> None:
        self._head = replace(
            self._head, warnings=event.warnings, part=event.part, unfused=event.unfused
        )

    def _sampler_ended(self, event: SamplerEnded) -> None:
        total = min(self._head.total, max(len(self._trials), event.trials))
        warnings = (*self._head.warnings, ended_words(event))
        self._head = replace(self._head, total=total, warnings=warnings)

    def _state_left_out(self, event: StateLeftOut) -> None:
        told = self._head.warnings
        if new := [place for place in event.places if not any(place in one for one in told)]:
            self._head = replace(self._head, warnings=(*told, left_out_words(new)))

    def _trial_planned(self, event: TrialPlanned) -> None:
        self._trial(event.trial).plan_as(event)
        if self._head.waits:
            self._head = replace(self._head, waits=())
        if len(self._trials) > self._head.total:  # it was added while the study runs
            self._head = replace(self._head, total=len(self._trials))

    def _trial_started(self, event: TrialStarted) -> None:
        self._trial(event.trial).lease(event.device, self._seconds)

    def _trial_moved(self, event: TrialMoved) -> None:
        self._trial(event.trial).lease(event.device, self._seconds)

    def _trial_parked(self, event: TrialParked) -> None:
        self._trial(event.trial).release()

    def _trial_resumed(self, event: TrialResumed) -> None:
        self._trial(event.trial).lease(event.device, self._seconds)

    def _trial_restarted(self, event: TrialRestarted) -> None:
        trial = self._trial(event.trial)
        trial.rewind(event.step, self._aim)
        trial.release()
        trial.restarts += 1

    def _trial_replanned(self, event: TrialReplanned) -> None:
        self._trial(event.trial).replan(event)

    def _trial_stopped(self, event: TrialStopped) -> None:
        self._trial(event.trial).finish(event, self._aim, TrialState.STOPPED)

    def _trial_pruned(self, event: TrialPruned) -> None:
        self._trial(event.trial).finish(event, self._aim, TrialState.PRUNED)

    def _trial_exploited(self, event: TrialExploited) -> None:
        self._trial(event.trial).inherit(event)

    def _checkpoint_written(self, event: CheckpointWritten) -> None:
        self._trial(event.trial).saved = event.path

    def _study_paused(self, event: StudyPaused) -> None:
        self._head = replace(self._head, is_paused=True)
        for trial in self._trials.values():
            trial.release()

    def _study_continued(self, event: StudyContinued) -> None:
        self._head = replace(self._head, is_paused=False)

    def _emulation_measured(self, event: EmulationMeasured) -> None:
        place = event.device, event.stream
        behind_s, emulated_s = self._head.emulated.get(place, (0.0, 0.0))
        now = behind_s + event.behind_s, emulated_s + event.emulated_s
        self._head = replace(self._head, emulated={**self._head.emulated, place: now})

    def _noted(self, event: Event) -> None:
        """Nothing that a screen draws."""

    def _step_finished(self, event: StepFinished) -> None:
        trial = self._trial(event.trial)
        if trial.is_done:  # a message that was late
            return
        if trial.state is TrialState.PENDING or trial.device != event.device:
            trial.lease(event.device, self._seconds - event.seconds)
        trial.finish_step(event, self._aim)
        device = self._device(event.device)
        device.recent.append(event.time)
        device.step_s, device.stalled = event.seconds, None

    def _evaluated(self, event: Evaluated) -> None:
        self._trial(event.trial).evaluate(event, self._aim)

    def _trial_finished(self, event: TrialFinished) -> None:
        trial = self._trial(event.trial)
        trial.finish(event, self._aim, TrialState.FINISHED)

    def _trial_failed(self, event: TrialFailed) -> None:
        trial = self._trial(event.trial)
        trial.state, trial.error, trial.step = TrialState.FAILED, event.error, event.step

    def _worker_started(self, event: WorkerStarted) -> None:
        self._device(event.device)

    def _worker_stalled(self, event: WorkerStalled) -> None:
        self._device(event.device).stalled = event

    def _worker_died(self, event: WorkerDied) -> None:
        device = self._device(event.device)
        device.restarts, device.stalled = device.restarts + 1, None
        self._wait_over(event.device)
        for number in event.trials:
            self._trial(number).release()

    def _peak_measured(self, event: PeakMeasured) -> None:
        device = self._device(event.device)
        device.peak_bytes = max(device.peak_bytes, event.peak_bytes)
        device.budget_bytes = event.budget_bytes
        device.predicted_bytes = max(device.predicted_bytes, event.predicted_bytes)

    def _action_finished(self, event: ActionFinished) -> None:
        self._device(event.device).add_action(event)
        self._work.add(event)

    def _study_finished(self, event: StudyFinished) -> None:
        self._head = replace(self._head, is_finished=True, stopped=event.stopped)
        for trial in self._trials.values():
            trial.release()


_FOLDS: dict[type[Any], Callable[[Folder, Any], None]] = {
    StudyStarted: Folder._study_started,
    PlanningWaited: Folder._planning_waited,
    PlanningGoesOn: Folder._noted,
    StudyPlanned: Folder._study_planned,
    TrialPlanned: Folder._trial_planned,
    TrialStarted: Folder._trial_started,
    TrialMoved: Folder._trial_moved,
    TrialParked: Folder._trial_parked,
    TrialResumed: Folder._trial_resumed,
    TrialRestarted: Folder._trial_restarted,
    TrialReplanned: Folder._trial_replanned,
    TrialWaits: Folder._noted,
    TrialStopped: Folder._trial_stopped,
    TrialPruned: Folder._trial_pruned,
    TrialExploited: Folder._trial_exploited,
    CheckpointWritten: Folder._checkpoint_written,
    CheckpointDamaged: Folder._noted,
    LoaderRestarted: Folder._noted,
    StateLeftOut: Folder._state_left_out,
    StorageFailed: Folder._noted,
    StudyPaused: Folder._study_paused,
    StudyContinued: Folder._study_continued,
    StudyChanged: Folder._noted,
    SamplerEnded: Folder._sampler_ended,
    StepFinished: Folder._step_finished,
    Evaluated: Folder._evaluated,
    TrialFinished: Folder._trial_finished,
    TrialFailed: Folder._trial_failed,
    WorkerStarted: Folder._worker_started,
    WorkerStalled: Folder._worker_stalled,
    WorkerDied: Folder._worker_died,
    PeakMeasured: Folder._peak_measured,
    EmulationMeasured: Folder._emulation_measured,
    ActionFinished: Folder._action_finished,
    StudyFinished: Folder._study_finished,
}


def _eta(
    head: Snapshot, trials: tuple[TrialRow, ...], devices: tuple[DeviceRow, ...]
) -> float | None:
    """Steps left over the speed of the devices at work; unplanned trials count the mean.

    Where a rule ends trials early, a trial's count by the part that one does on average, and by
    more the more it has done: who is far on goes to the end.
    """
    if head.is_finished:
        return 0.0
    speed = sum(device.speed or 0.0 for device in devices if device.trials)
    known = [row.steps for row in trials if row.steps is not None]
    if not speed or not known:
        return None
    usual = sum(known) / len(known)
    totals = ((usual if r.steps is None else r.steps, r.step) for r in trials if not r.is_done)
    left = sum(_likely(total, done, head.part) for total, done in totals if total > done)
    return (left + _likely(usual, 0, head.part) * max(0, head.total - len(trials))) / speed


def _likely(total: float, done: int, part: float) -> float:
    return (total - done) * (part + (1 - part) * done / total)
