"""What happens in a study, in lines of text."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from types import TracebackType
from typing import IO

from shoal.core.errors import last_words
from shoal.core.event import (
    CheckpointDamaged,
    Evaluated,
    Event,
    LoaderRestarted,
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
    TrialPruned,
    TrialReplanned,
    TrialRestarted,
    TrialStopped,
    TrialWaits,
    WorkerDied,
    WorkerStalled,
)
from shoal.core.seats import OTHERS_PRUNED
from shoal.core.units import Seconds, counted, format_foretold, format_seconds
from shoal.observe.rows import TrialRow, changes
from shoal.observe.snapshot import Folder, Snapshot
from shoal.observe.states import counts_of
from shoal.ui.text import (
    format_changes,
    format_metric,
    format_steps,
    plain_reason,
    shorten,
)

NO_METRICS = ": no metrics"
PLAIN_S = 5.0
PLAIN_EVALUATIONS = 12  # of so many in ``PLAIN_S`` there is a line; of more, how many there were
_SIGNAL = re.compile(r"SIG[A-Z]+ was received")
_WORKS = {"build": "built", "measure": "measured"}


class PlainLines:
    """A line for what a log's reader wants to find, and one of progress every five seconds."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._folder = Folder()
        self._next_s: float | None = None
        self._broken = False
        self._replanned = ""
        self._warned: tuple[str, ...] = ()
        self._evaluated = 0  # since the last line of progress

    def __call__(self, event: Event) -> None:
        if self._broken:
            return
        try:
            self._folder.add(event)
            for line in self._lines(event):
                print(line, file=self._stream, flush=True)
        except Exception as error:  # a screen must not stop what it shows
            self._broken = True
            print(f"the progress lines stopped, the study goes on: {error!r}", file=sys.stderr)

    def catch_up(self, events: Iterable[Event]) -> None:
        """Say in a line where the study is, or how it ended."""
        ending: StudyFinished | None = None
        event: Event | None = None
        for event in events:
            self._folder.add(event)
            ending = event if isinstance(event, StudyFinished) else ending
        if event is None:
            return
        snapshot = self._folder.snapshot()
        ended = ending if snapshot.is_finished else None
        line = f"{snapshot.study}: {describe(ended)}" if ended else describe_progress(snapshot)
        print(line, file=self._stream, flush=True)

    def tell(self, events: Iterable[Event]) -> None:
        """A line for each that has one; unlike a call it raises what goes wrong."""
        for event in events:
            self._folder.add(event)
            for line in self._lines(event):
                print(line, file=self._stream, flush=True)

    def look_back(self, before: Snapshot) -> None:
        """Go on from what the study came to before."""
        self._folder = before.folder()

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def _lines(self, event: Event) -> list[str]:
        if isinstance(event, Evaluated):
            self._evaluated += 1
            if self._evaluated > PLAIN_EVALUATIONS:
                return []
        line = self._why_again(event) or describe(self._of_all_runs(event))
        if isinstance(event, Evaluated | TrialFinished) and not event.metrics:
            line = line.removesuffix(NO_METRICS) + self._loss_of(event.trial)
        lines = [line] if line else []
        if isinstance(event, StudyPlanned):
            lines += [f"unfused {words}" for words in event.unfused]
        if isinstance(event, StudyPlanned | SamplerEnded | StateLeftOut):
            warnings = self._folder.snapshot().warnings
            lines += [f"WARNING: {one}" for one in warnings if one not in self._warned]
            self._warned = warnings
        if isinstance(event, StudyFinished):
            lines = [*describe_behind(self._folder.snapshot()), *lines, *self._in_all()]
        if isinstance(event, StepFinished) and self._is_due(event.time):
            lines.append(describe_progress(self._folder.snapshot()) + self._more())
        return lines

    def _of_all_runs(self, event: Event) -> Event:
        """The end of a trial with the seconds of all runs; it knows of its own."""
        if not isinstance(event, TrialFinished):
            return event
        seconds = self._folder.trial(event.trial).seconds
        return replace(event, seconds=max(event.seconds, seconds))

    def _in_all(self) -> list[str]:
        """What all runs of a study came to, where there were several."""
        snapshot = self._folder.snapshot()
        if snapshot.runs < 2:
            return []
        runs = f"{counted(snapshot.total, 'trial')} in {snapshot.runs} runs"
        return [f"of all {runs}: {counts_of(snapshot)}"]

    def _more(self) -> str:
        """How many evaluations went by without a line."""
        left, self._evaluated = self._evaluated - PLAIN_EVALUATIONS, 0
        return f", {counted(left, 'more evaluation')}" if left > 0 else ""

    def _loss_of(self, trial: int) -> str:
        """What there is to say of a trial that nothing was evaluated of."""
        loss = self._folder.trial(trial).loss
        return NO_METRICS if loss is None else f": loss {format_metric(loss)}"

    def _why_again(self, event: Event) -> str:
        """Why a trial is planned again; of trials in a row for one reason said of the first."""
        if not isinstance(event, TrialReplanned) or event.reason.startswith(OTHERS_PRUNED):
            return ""
        if event.reason == self._replanned:
            return ""
        self._replanned = event.reason
        return f"trial {event.trial} is planned again: {plain_reason(event.reason)}"

    def _is_due(self, now: float) -> bool:
        if self._next_s is None:
            self._next_s = now + PLAIN_S
        if now < self._next_s:
            return False
        self._next_s = now + PLAIN_S
        return True


def describe(event: Event) -> str:
    """An event in a line, or nothing for the many that only move numbers."""
    match event:
        case StudyStarted():
            names = ", ".join(str(device.get("name", "")) for device in event.devices)
            return f"{event.study}: {counted(event.trials, 'trial')} on {names}"
        case StudyPlanned():
            foretold = format_foretold(event.seconds, event.trials)
            return f"planned {counted(event.trials, 'trial')}: predicted {foretold}"
        case Evaluated():
            return f"trial {event.trial} step {event.step}{_metrics(event.metrics)}"
        case TrialFinished():
            return (
                f"trial {event.trial} finished after {counted(event.step, 'step')} and "
                f"{format_seconds(event.seconds)}{_metrics(event.metrics)}"
            )
        case TrialFailed():
            reason = TrialRow(number=event.trial, error=event.error).error_line
            return f"trial {event.trial} FAILED at step {event.step}: {reason}"
        case TrialStopped():
            return f"trial {event.trial} stopped at step {event.step}: {first_line(event.reason)}"
        case TrialPruned():
            return f"trial {event.trial} pruned at step {event.step}: {first_line(event.reason)}"
        case TrialExploited():
            return (
                f"trial {event.trial} goes on from trial {event.source}'s state after step "
                f"{event.step}, with {format_changes(changes(event.before, event.hp))}"
            )
        case TrialRestarted():
            why = f": {first_line(event.reason)}" if event.reason else ""
            does = f"goes on from step {event.step}" if event.step else "begins again"
            return f"trial {event.trial} {does}{why}"
        case TrialWaits():
            return f"trial {event.trial} waits at step {event.step}: {first_line(event.reason)}"
        case WorkerDied():
            trials = ", ".join(map(str, event.trials)) or "none"
            why = without_traceback(event.reason)
            return f"the worker of {event.device} died ({why}); trials on it: {trials}"
        case WorkerStalled():
            return describe_stall(event)
        case PlanningGoesOn():
            return "planning: each distinct model is measured once ..."
        case PlanningWaited():
            return describe_wait(event)
        case StudyFinished():
            stopped = f"; {describe_stop(event.stopped)}" if event.stopped else ""
            pruned = f", {event.pruned} pruned" if event.pruned else ""
            return (
                f"{counted(event.finished, 'trial')} finished{pruned}, {event.failed} failed, in "
                f"{format_seconds(event.seconds)}{stopped}"
            )
    return _describe_durability(event)


def without_traceback(reason: str) -> str:
    """Of a death by an exception which it was; its traceback is on record, and told at the end."""
    first, begins, _ = reason.partition("\nTraceback (most recent call last):\n")
    return f"{first}: {last_words(reason)}" if begins else reason


def describe_stop(reason: str) -> str:
    """Why a study ended before its time; after a signal, what to do."""
    goes_on = "; the same command goes on" if _SIGNAL.fullmatch(reason) else ""
    return f"stopped: {first_line(reason)}{goes_on}"


def describe_wait(event: PlanningWaited) -> str:
    """What planning waits for, and until when it does."""
    seconds, limit = format_seconds(event.seconds), format_seconds(event.limit_s)
    doing = f"trial {event.trial} is being {_WORKS.get(event.work, event.work)} on {event.device}"
    if event.trial is None:
        doing = f"the worker of {event.device} is starting"
    return f"planning: {doing}, for {seconds} so far; after {limit} it counts as a hang"


def describe_stall(event: WorkerStalled) -> str:
    """That a worker gets nothing done, whose code that is, and until when it is waited for."""
    seconds, limit = format_seconds(event.seconds), format_seconds(event.limit_s)
    trials = ", ".join(map(str, event.trials)) or "none"
    whose = f" trial {event.trial}'s code" if event.trial is not None else ""
    stands = f",{whose} at {event.place}" if event.place else f" in{whose}" if whose else ""
    return (
        f"{event.device} got nothing done for {seconds}{stands}; after {limit} that counts as a "
        f"hang; trials on it: {trials}"
    )


def _describe_durability(event: Event) -> str:
    match event:
        case StudyPaused():
            return f"the study is paused: {first_line(event.reason)}"
        case StudyContinued():
            return "the study goes on"
        case StudyChanged():
            return "the study goes on with changes: " + "; ".join(event.changes)
        case CheckpointDamaged():
            return f"{event.path} of trial {event.trial} is damaged: {first_line(event.reason)}"
        case StorageFailed():
            error = first_line(event.error)
            return f"{event.path} could not be written: {error}; {event.action}"
        case LoaderRestarted():
            return (
                f"a process that reads trial {event.trial}'s data died at step {event.step} "
                f"({first_line(event.reason)}); another one reads on"
            )
    return ""


def first_line(text: str) -> str:
    """As much of it as a line of a log has room for."""
    return shorten(text.partition("\n")[0], 60)


def describe_progress(snapshot: Snapshot) -> str:
    """The whole study in a line."""
    total = total_steps(snapshot)
    eta = "" if snapshot.eta_seconds is None else f", ETA {format_seconds(snapshot.eta_seconds)}"
    return (
        f"{snapshot.study}: step {format_steps(snapshot.steps_done, total)}, "
        f"{counts_of(snapshot)}, {format_seconds(snapshot.seconds)} elapsed{eta}"
    )


def _metrics(metrics: object) -> str:
    items = dict(metrics).items()  # type: ignore[call-overload]  # a mapping of floats
    found = ", ".join(f"{name} {format_metric(value)}" for name, value in items)
    return f": {found}" if found else NO_METRICS


def describe_behind(snapshot: Snapshot) -> list[str]:
    """Why an emulated run is not to be believed, if it did not keep up."""
    late = []
    for place, seconds in sorted(snapshot.behind.items()):
        behind, whole = map(format_seconds, map(Seconds, seconds))
        late.append(f"{' '.join(place)} fell behind the emulated times by {behind} of {whole}")
    advice = "these seconds are not the profile's: emulate a slower device (a larger scale)"
    return [*late, *[advice] * bool(late)]


def total_steps(snapshot: Snapshot) -> int | None:
    """What there is to do in all: of a trial that has ended no more than it did; None: unknown.

    Trials that are not planned yet are taken for usual ones.
    """
    done = sum(row.step for row in snapshot.trials if row.is_done)
    waiting = [row for row in snapshot.trials if not row.is_done]
    left = [row.steps for row in waiting if row.steps is not None]
    known = [row.steps for row in snapshot.trials if row.steps is not None]
    unplanned = snapshot.total - len(snapshot.trials)
    if len(left) < len(waiting) or not snapshot.trials or (unplanned and not known):
        return None
    return done + sum(left) + round(unplanned * sum(known) / max(1, len(known)))
