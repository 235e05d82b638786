"""What a run knows of the study's search, and how the search hears what happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core import event as events
from shoal.core.aim import Aim
from shoal.core.spec import Scalar
from shoal.observe.machines import TrialFold
from shoal.observe.rows import TrialState
from shoal.search import Exploit, Population, Search

Grow = Callable[[Sequence[dict[str, Scalar]]], None]


class Telling:
    """Tells a search what events say of its trials, from the first event of the study on."""

    def __init__(self, search: Search | Population, metric: str, mode: str) -> None:
        self._search, self._metric = search, metric
        self._aim, self._folds = Aim(metric, mode), dict[int, TrialFold]()

    def __call__(self, event: events.Event) -> None:
        """Pass on what the event says, if the search wants to know."""
        match event:
            case events.StepFinished() | events.TrialRestarted():
                if self._metric == "train_loss":  # a mean of steps, as screens show it
                    self._fold_step(event)
            case events.Evaluated():
                value = self._measured(event)
                if value is not None:
                    self._search.report(event.trial, event.step, value)
            case events.TrialFinished():
                self._finished(event)
            case events.TrialPruned():
                self._search.end(event.trial, "pruned")
            case events.TrialFailed() | events.TrialStopped():
                self._search.end(event.trial, "failed")
            case events.TrialPlanned():
                self._search.reopen(event.trial)
            case events.TrialExploited():
                if isinstance(self._search, Population):
                    self._search.exploited(event.trial, event.step, _exploit(event))

    def _fold(self, trial: int) -> TrialFold:
        return self._folds.setdefault(trial, TrialFold(trial))

    def _fold_step(self, event: events.StepFinished | events.TrialRestarted) -> None:
        if isinstance(event, events.StepFinished):
            self._fold(event.trial).finish_step(event, self._aim)
        else:
            self._fold(event.trial).rewind(event.step, self._aim)

    def _measured(self, event: events.Evaluated) -> float | None:
        if self._metric != "train_loss":
            return event.metrics.get(self._metric)
        fold = self._fold(event.trial)
        fold.evaluate(event, self._aim)
        return fold.metrics.get(self._metric)

    def _finished(self, event: events.TrialFinished) -> None:
        value = event.metrics.get(self._metric)
        if value is None and self._metric == "train_loss":
            fold = self._fold(event.trial)
            fold.finish(event, self._aim, TrialState.FINISHED)
            value = fold.metrics.get(self._metric)
        if value is not None:
            self._search.report(event.trial, event.step, value)
        self._search.end(event.trial, "finished", value)


def _exploit(event: events.TrialExploited) -> Exploit:
    return Exploit(source=event.source, hp=dict(event.hp), before=dict(event.before))


@dataclass(slots=True)
class Hunt:
    """A search, and who tells it; nothing of either where every trial is known and ends late."""

    search: Search | Population | None = None
    tell: Telling | None = None
    metric: str = ""
    keys: Mapping[int, Mapping[str, Scalar]] = field(default_factory=dict)
    """The numerics keys of trials that were planned in earlier runs."""
    grow: Grow = lambda points: None
    """Makes points trials of the study and runs them."""

    def ran_out(self) -> tuple[events.SamplerEnded, ...]:
        """That the sampler has points for fewer trials than were asked for, if so."""
        search = self.search
        if not isinstance(search, Search) or search.expected >= search.asked:
            return ()
        ended = events.SamplerEnded(
            time=time.time(), sampler=search.sampler, trials=search.expected, asked=search.asked
        )
        return (ended,)

    def hp_now(self, number: int) -> Mapping[str, Scalar] | None:
        """What a trial of a population has changed to; None where it has changed nothing."""
        happened = self.search.happened(number) if isinstance(self.search, Population) else {}
        return happened[max(happened)].hp if happened else None

    def enroll(self, number: int, hp: Mapping[str, Scalar]) -> None:
        """A trial that was added is a point of the space."""
        if self.search is not None and not self.search.is_searched(number):
            self.search.enroll(number, dict(hp))
