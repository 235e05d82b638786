"""What can be asked of a study while it runs, done in its main loop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.control import (
    Answer,
    CloneTrial,
    Command,
    Continue,
    ExtendTrials,
    Pause,
    Status,
    StopStudy,
    StopTrial,
)
from shoal.core.errors import ShoalError, SpecError
from shoal.core.event import Event, StudyPaused
from shoal.core.spec import Scalar, TrialSpec
from shoal.execution.hunt import Hunt
from shoal.execution.run import Execution
from shoal.execution.trial import Start
from shoal.launch.cloning import begin_warm, clear
from shoal.launch.growing import Grown, MorePoints, Order, grow, of_today
from shoal.launch.searching import plan_some
from shoal.planning import Planned
from shoal.resume import StudyRecord, with_searched
from shoal.runtime.pool import WorkerPool

Grow = Callable[[StudyRecord, Planned, Sequence[TrialSpec], Mapping[int, Start]], None]


class Door:
    """Takes commands from the moment the directory is held; ``commands`` once there is a run.

    ``heeds_signals``: whether a signal ends a run that is planned, and nothing besides.
    """

    def __init__(self, *, heeds_signals: bool) -> None:
        self.commands: Commands | None = None
        self._heeds_signals = heeds_signals

    def deliver(self, command: Command, answer: Answer) -> None:
        """Hand it on, or say that the study is being planned."""
        if self.commands is not None:
            self.commands.deliver(command, answer)
        elif isinstance(command, Status):
            answer({"state": "planning", "pid": os.getpid()})
        elif isinstance(command, StopStudy) and self._heeds_signals:
            answer({"text": "stopped while it was planned: nothing was trained"})
            os.kill(os.getpid(), signal.SIGTERM)
        elif isinstance(command, StopStudy):
            raise SpecError(
                "the study is being planned in a thread of a program, all of which would end. "
                "Ask again when it trains."
            )
        else:
            raise SpecError("the study is being planned. Ask again when it trains.")


class Commands:
    """Answers commands; ``deliver`` is called by the socket's thread, the rest by the loop.

    Args:
        record: The study's, as it stands.
        more_points: The record with so many more trials of the space.
        grow: Makes a larger record durable and says so in events.
        hunt: The search, which gets a way to have trials added.
    """

    def __init__(
        self,
        pool: WorkerPool,
        execution: Execution,
        directory: str,
        record: StudyRecord,
        *,
        more_points: MorePoints,
        grow: Grow,
        hunt: Hunt,
    ) -> None:
        self._pool, self._execution, self._directory = pool, execution, directory
        self._record, self._more_points, self._grow = record, more_points, grow
        self._hunt = hunt
        hunt.grow = self._add_points
        self._at_end: list[Answer] = []
        self._when_paused: list[Answer] = []

    def deliver(self, command: Command, answer: Answer) -> None:
        """Have the main loop do it."""
        self._pool.post(lambda: self._do(command, answer))

    def see(self, event: Event) -> None:
        """Answers that wait for something that happened."""
        if isinstance(event, StudyPaused):
            waiting, self._when_paused = self._when_paused, []
            for answer in waiting:
                answer({"text": "paused: every trial is saved, the devices are idle"})

    def ended(self) -> None:
        """The run is over."""
        unsaved = self._execution.unsaved
        text = "stopped: every trial is saved"
        if unsaved:
            reasons = "; ".join(f"trial {trial}: {why}" for trial, why in sorted(unsaved.items()))
            text = f"stopped, and not all is saved; what is missing is trained again. {reasons}"
        for answer in [*self._at_end, *self._when_paused]:
            answer({"text": text, "unsaved": list(unsaved)})

    def _do(self, command: Command, answer: Answer) -> None:
        try:
            self._obey(command, answer)
        except Exception as error:  # a sampler of the user's may raise: the study goes on
            answer({"error": _in_words(error)})

    def _obey(self, command: Command, answer: Answer) -> None:
        execution = self._execution
        match command:
            case StopStudy():
                self._at_end.append(answer)
                execution.stop(command.reason or "shoal stop", grace_s=command.grace_s)
            case StopTrial():
                self._stop_trial(command, answer)
            case Pause():
                self._pause(answer)
            case Continue():
                self._continue(answer)
            case ExtendTrials():
                self._plan_later(lambda: self._extend(command), answer)
            case CloneTrial():
                self._clone(command, answer)
            case Status():
                answer({"state": execution.state, "pid": os.getpid()})

    def _pause(self, answer: Answer) -> None:
        if self._execution.state == "paused":
            raise SpecError("the study is paused already. Let it go on with: shoal resume.")
        self._when_paused.append(answer)
        self._execution.pause("shoal pause")

    def _continue(self, answer: Answer) -> None:
        if not self._execution.proceed():
            raise SpecError(f"the study is {self._execution.state}, not paused.")
        waiting, self._when_paused = self._when_paused, []
        for early in waiting:
            early({"error": "somebody let the study go on before all of it was paused."})
        answer({"text": "going on"})

    def _plan_later(self, work: Callable[[], Mapping[str, Any]], answer: Answer) -> None:
        """Do what plans more trials once no other plan is under way; its result is the answer."""

        def do() -> None:
            try:
                answer(work())
            except Exception as error:
                answer({"error": _in_words(error)})

        self._execution.when_free(do)

    def _stop_trial(self, command: StopTrial, answer: Answer) -> None:
        trial = command.trial
        self._record.trial(trial)
        if self._execution.trial(trial) is None:
            raise SpecError(
                f"trial {trial} has ended already. See how: shoal show --trial {trial}."
            )

        def tell(is_stopped: bool) -> None:
            ended = "is stopped; its state is kept" if is_stopped else "ended before it could stop"
            answer({"text": f"trial {trial} {ended}"})

        self._execution.stop_trial(trial, command.reason or "shoal stop", tell)

    def _clone(self, command: CloneTrial, answer: Answer) -> None:
        is_new = self._decide(command).is_new  # refuse now

        def add() -> None:
            self._plan_later(lambda: self._add_clone(command), answer)

        if is_new and command.warm and self._execution.trial(command.trial) is not None:
            self._execution.save_then(command.trial, lambda: self._pool.post(add))
        else:
            add()

    def _add_clone(self, command: CloneTrial) -> Mapping[str, Any]:
        grown = self._decide(command)
        if not grown.is_new:
            return _told(grown)
        (clone,), starts = grown.trials, {}
        if command.warm:
            starts[clone] = begin_warm(self._directory, command.trial, clone)
        try:
            self._add(grown.record, starts)
        except ShoalError:
            clear(self._directory, clone)
            raise
        return _told(grown)

    def _extend(self, command: ExtendTrials) -> Mapping[str, Any]:
        grown = self._decide(command)
        if grown.is_new:
            self._add(grown.record, {})
        return _told(grown)

    def _decide(self, order: Order) -> Grown:
        """What it comes to as things stand; another one may be under way."""
        trials = [trial.number for trial in self._record.trials]
        ended = {number for number in trials if self._execution.trial(number) is None}
        if isinstance(order, CloneTrial):
            order = of_today(order, self._record, self._hunt.hp_now(order.trial))
        return grow(self._record, order, self._more_points, ended=ended, time=time.time())

    def _add_points(self, points: Sequence[dict[str, Scalar]]) -> None:
        """Make the points of a search trials of the study, and run them.

        Raises:
            PlanError: there is no room for their state on the disk or the host.
            WorkerError: the run ends.
        """
        larger = with_searched(self._record, points)
        new = [trial.to_spec() for trial in larger.trials[len(self._record.trials) :]]
        planned = plan_some(self._execution.plan_points, new, self._execution.first_plan)
        self._admit(larger, new, planned, {})

    def _add(self, larger: StudyRecord, starts: Mapping[int, Start]) -> None:
        known = {trial.number for trial in self._record.trials}
        new = [t.to_spec() for t in larger.trials if t.number not in known]
        self._admit(larger, new, self._execution.plan(new), starts)

    def _admit(
        self,
        larger: StudyRecord,
        new: Sequence[TrialSpec],
        planned: Planned,
        starts: Mapping[int, Start],
    ) -> None:
        """Make planned trials part of the record, then of the run."""
        for spec in new:
            if spec.number not in starts:
                clear(self._directory, spec.number)
        self._grow(larger, planned, new, starts)
        self._record = larger
        for trial in larger.trials[-len(new) :]:
            if trial.origin != "cloned":
                self._hunt.enroll(trial.number, trial.hp)
        self._execution.add(planned, starts)


def _told(grown: Grown) -> dict[str, Any]:
    return {"text": grown.text, "trials": list(grown.trials), "added": grown.is_new}


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
