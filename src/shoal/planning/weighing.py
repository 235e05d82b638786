"""Schedules weighed by the time to the loss: half backwards, and stale weights if allowed.

Candidates are on paper; only what is about to be taken is measured, and weighed again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from shoal.core.errors import PlanError
from shoal.core.spec import JobMeasure, TrialSpec
from shoal.core.stale import Stale
from shoal.core.technique import Pipelined
from shoal.core.units import Bytes, format_bytes
from shoal.memory.layout import lenders
from shoal.planner.pipeline import Alternative, Staged
from shoal.planner.steptime import Terms
from shoal.planner.timetoloss import (
    RIVALS,
    Pace,
    Place,
    in_words,
    pace_of,
    pace_on_one,
    rival,
    soonest,
)
from shoal.runtime.wire.messages import Measured, Order

Found = tuple[Measured, Staged]
Weighed = tuple[Found | None, Sequence[str]]
"""What is taken instead, measured, if anything is; and what was weighed, in words."""
TIED = (
    "stages have weights in common, and where they are borrowed only the guess of them is known, "
    "which is not to be evaluated"
)


def guesses_ties(asked: Pipelined, exact: Measured) -> bool:
    """Whether weights that stages have in common would be guessed."""
    return asked.predict and exact.layout is not None and bool(lenders(exact.layout))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finder:
    """How pipelines of one model are looked for: ``Pipelining`` lends its ways.

    ``impossible`` says in words why a model cannot be one, ``fitting`` gives those that should
    fit on paper, the best first, and ``exact`` measures until one does.
    """

    impossible: Callable[[JobMeasure, Pipelined], str]
    fitting: Callable[[Pipelined, Terms, int, Bytes], Iterator[Staged]]
    exact: Callable[
        [TrialSpec, Pipelined, Terms, int], Generator[Order, Measured, Found | PlanError]
    ]


@dataclass(slots=True, kw_only=True)
class Weighing:
    """The schedules of one trial's pipeline against what would be taken without them.

    Args:
        asked: The pipeline with flush.
        stale: What a step with stale weights is worth; None: they are not weighed.
    """

    trial: TrialSpec
    asked: Pipelined
    terms: Terms
    place: Place
    stale: Stale | None
    finder: Finder
    _options: dict[str, Pipelined] = field(default_factory=dict, init=False)
    _paces: dict[str, Pace] = field(default_factory=dict, init=False)
    _refused: dict[str, str] = field(default_factory=dict, init=False)

    def weigh(self, first: Found | Alternative) -> Generator[Order, Measured, Weighed]:
        """What is clearly sooner at the loss than ``first``, a pipeline or one device each."""
        if isinstance(first, Alternative):
            start = pace_on_one(first, self.place)
        else:
            start = self._pace(first)
        self._on_paper()
        if not self._paces and self.stale is None:
            return None, ()  # nobody asked for what could not be
        exacts: dict[str, Found] = {}
        while (best := soonest(start, list(self._paces.values()))) is not start:
            if best.name in exacts:
                break
            measured = yield from self._measured(best.name)
            if measured is not None:
                exacts[best.name] = measured
                self._paces[best.name] = self._pace(measured)
        if self.stale is None and best is start and isinstance(first, Alternative):
            return None, ()  # nobody asked for stages
        paces = [start, *self._paces.values()]
        return exacts.get(best.name), in_words(best, paces, self._refused, self.stale)

    def _on_paper(self) -> None:
        """What is weighed, and why other schedules are not."""
        place = self.place
        rivals = [one for one in RIVALS if one != "2bw" or self.stale is not None]
        for schedule in rivals:
            option = rival(self.asked, schedule, self.stale)
            if isinstance(option, str):
                self._refused[schedule] = option
                continue
            why = self.finder.impossible(self.terms.measure, option)
            fitting = self.finder.fitting(option, self.terms, place.trials, place.budget)
            paper = None if why else next(fitting, None)
            if paper is None:
                none = f"no cut into stages should fit {format_bytes(place.budget)}"
                self._refused[schedule] = why.rstrip(".") or none
                continue
            self._options[schedule] = option
            self._paces[schedule] = pace_of(paper, None, self.terms, place, self.stale)

    def _measured(self, name: str) -> Generator[Order, Measured, Found | None]:
        """A schedule with stages that were measured; None, and it is out, where none fit."""
        option = self._options[name]
        found = yield from self.finder.exact(self.trial, option, self.terms, self.place.trials)
        if not isinstance(found, PlanError) and not guesses_ties(option, found[0]):
            return found
        del self._paces[name]
        self._refused[name] = TIED
        if isinstance(found, PlanError):
            self._refused[name] = "what should fit does not, now that its stages are measured"
        return None

    def _pace(self, found: Found) -> Pace:
        exact, chosen = found
        return pace_of(chosen, exact.layout, self.terms, self.place, self.stale)
