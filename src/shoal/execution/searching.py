"""A search carried out: trials wait at rungs, go on or are pruned, and others come.

[Note: a rung]
A trial is never granted a step past the rung at which it is to wait, so nothing has to be stopped
in time, and nothing is done that a decision could come too late for:

    lease      ... step 19, step 20, evaluated | over: parked on the host, its device is free
    tick       its generation is decided there   ->  wait for a device again, to the next rung
                                                 ->  saved as it stands, and PRUNED

What is decided follows from events alone (hunt.py), those of earlier runs too; so whoever goes
on after a crash comes to the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from shoal.core.errors import ShoalError, StorageError
from shoal.execution.endings import Endings
from shoal.execution.exploiting import Exploiting
from shoal.execution.floor import Floor
from shoal.execution.hunt import Hunt
from shoal.execution.pausing import Pausing
from shoal.execution.rungs import steps_between
from shoal.execution.seating import Seating
from shoal.execution.trial import TrialRun
from shoal.runtime.wire.messages import Settings
from shoal.search import Population, Search


class Searching:
    """Does what a search says; one thread's.

    Args:
        stop: Ends the run, with a reason and an error.
    """

    def __init__(
        self,
        hunt: Hunt,
        floor: Floor,
        pausing: Pausing,
        endings: Endings,
        settings: Settings,
        stop: Callable[[str, ShoalError], None],
    ) -> None:
        self._hunt, self._search = hunt, hunt.search
        self._floor, self._pausing, self._endings = floor, pausing, endings
        self._settings, self._stop = settings, stop
        self._every: dict[int, int] = {}  # steps between a trial's evaluations
        self._waiting: set[int] = set()
        self._unsaved: set[int] = set()  # that could not make room, as they stand
        self._is_busy = self._has_failed = False
        self._exploiting = Exploiting(floor, pausing, endings, stop)
        search = hunt.search
        self._seating = Seating(search, floor, hunt.keys) if isinstance(search, Search) else None
        floor.hear = hunt.tell

    @property
    def is_asking(self) -> bool:
        """Whether trials may come that nobody has asked for yet, and could."""
        idle = not (self._is_busy or self._has_failed)
        return self._search is not None and idle and self._search.can_ask

    @property
    def prunes(self) -> bool:
        """Whether trials of the search wait at rungs, and may end there."""
        return isinstance(self._search, Search) and self._search.prunes

    def enroll(self, state: TrialRun, num_batches: int | None) -> None:
        """A trial is there: how often is it evaluated?"""
        trial, search = state.job.trial, self._search
        if search is None or not search.is_searched(trial):
            return
        every = steps_between(self._settings, num_batches, state.job.micro_batches)
        if every is not None and state.total is not None:
            self._every[trial] = every
            search.ends_at(trial, -(-state.total // every), every=every, done=state.step)
        if isinstance(search, Population):
            state.inherits = dict(search.happened(trial))
            state.inherited_at = state.step if state.warm else -1

    def set_halts(self, trials: Iterable[int]) -> None:
        """Say where trials wait first, when all that are there are enrolled.

        Raises:
            SpecError: the pruner raised.
        """
        if self._search is None:
            return
        self._search.decide()  # what is on record may have passed rungs already
        for trial in sorted(self._every.keys() & set(trials)):
            state = self._floor.states[trial]
            if self._seating is not None:
                self._seating.take(state, self._every[trial])
            state.halt = self._next_halt(state)

    def arrived(self, state: TrialRun) -> None:
        """A trial stands where it waits, without a device."""
        self._waiting.add(state.job.trial)

    def ask(self) -> None:
        """Have the trials that can be asked for now become part of the study."""
        search = self._search
        if not isinstance(search, Search) or not self.is_asking:
            return
        self._is_busy, expected = True, search.expected
        try:
            if points := search.more():
                self._hunt.grow(points)
            if search.expected < expected:
                for event in self._hunt.ran_out():
                    self._floor.tell(event)
        except ShoalError as error:
            self._has_failed = True
            if self._pausing.state != "stopping":
                self._stop("the search cannot go on", error)
        finally:
            self._is_busy = False

    def tick(self) -> None:
        """Draw conclusions, and have trials go on or end that wait for them."""
        if self._search is None or not self._waiting:
            return
        try:
            self._search.decide()
        except ShoalError as error:
            self._waiting.clear()
            self._stop("the search cannot go on", error)
        if isinstance(self._search, Population) and self._search.due:
            self._exploit(self._search)
        for trial in sorted(self._waiting):
            state = self._floor.states[trial]
            if trial not in self._floor.open:
                self._waiting.discard(trial)
            elif not state.device and not state.after_save:
                self._look(self._search, state)
        if self._floor.has_deferred and self._pausing.state == "running":
            self._make_room()

    def _exploit(self, population: Population) -> None:
        """Have what is due at a rung happen, once all whom it concerns wait there."""
        if self._pausing.state != "running":
            return
        there = {t: s for t in self._waiting if self._stands(s := self._floor.states[t])}
        lost = self._exploiting.out_of_reach(population.due, there)
        for state in lost:
            self._waiting.discard(state.job.trial)
            self._begin_again(state)
        if not lost and self._exploiting.do(population.due, there):
            population.decide()

    def _stands(self, state: TrialRun) -> bool:
        """Whether nothing is under way with a trial that waits."""
        is_free = not state.device and not state.after_save
        return is_free and state.job.trial in self._floor.open

    def _look(self, search: Search | Population, state: TrialRun) -> None:
        trial, rung = state.job.trial, state.step // self._every[state.job.trial]
        following = search.next_rung(trial, rung)
        if state.lost_step == state.step:
            self._take_over_again(state)
        elif not search.is_known_at(trial, rung):
            self._waiting.discard(trial)
            self._endings.failed(trial, self._unmeasured(state))
        elif search.pruned_at(trial) == rung:
            self._waiting.discard(trial)
            self._prune(state, rung)
        elif following is None or following > rung:
            self._waiting.discard(trial)
            if self._seating is not None:
                self._seating.take(state, self._every[trial])
            state.halt = self._next_halt(state)
            self._begin_again(state)

    def _take_over_again(self, state: TrialRun) -> None:
        """What it went on from was damaged; where that is gone for good it has failed."""
        if self._pausing.state == "running" and self._exploiting.again(state):
            self._waiting.discard(state.job.trial)
            state.halt = self._next_halt(state)
            self._begin_again(state)

    def _prune(self, state: TrialRun, rung: int) -> None:
        """Save it as it stands; where no worker has it any more, one takes it up again first."""
        metric = self._hunt.metric
        assert isinstance(self._search, Search)
        reason = f"{self._search.why} {metric} at evaluation {rung}"
        if math.isnan(state.metrics.get(metric, 0.0)):
            reason = f"its {metric} was not a number at evaluation {rung}"

        def end() -> None:
            if state.job.trial not in self._floor.open:
                return
            if self._is_out_of_reach(state):
                self._begin_again(state)
            else:
                self._endings.pruned(state, reason)

        if self._is_out_of_reach(state):
            end()
        else:
            self._pausing.save_then(state, end)

    def _is_out_of_reach(self, state: TrialRun) -> bool:
        """Whether it is not saved as it stands, and nobody is there who could do that."""
        return state.is_dirty and state.parked_at not in self._floor.pool.workers

    def _make_room(self) -> None:
        """Where the host has none for a trial that others wait for, one of them waits on disk.

        As many do as devices would idle for want of a trial.
        """
        states = [self._floor.states[trial] for trial in sorted(self._floor.open)]
        busy = [state for state in states if self._has_work(state)]
        if sum(state.job.gang for state in busy) >= self._floor.plan.at_once:
            return
        able = [s for s in states if s.descriptor is not None and s.job.trial in self._waiting]
        able = [s for s in able if self._stands(s) and not self._is_out_of_reach(s)]
        for state in able:
            if state.job.trial not in self._unsaved:
                self._pausing.save_then(state, partial(self._put_away, state))
                return
        if able and not busy:
            self._give_up_room(able)

    def _has_work(self, state: TrialRun) -> bool:
        """Whether a trial has a device, waits for nothing else, or is being saved."""
        is_there = state.descriptor is not None and state.job.trial not in self._waiting
        return bool(state.device or state.after_save or is_there)

    def _give_up_room(self, able: Sequence[TrialRun]) -> None:
        """None of those that wait can be saved: nobody would ever go on."""
        trials = [state.job.trial for state in able]
        why = self._pausing.unsaved.get(trials[0], "")
        error = StorageError(
            f"the host has no room for all trials that wait for each other, and of those that "
            f"have some none can be saved ({', '.join(map(str, trials))}): {why} Make room on the "
            "disk, or give host_memory= more, and run the same command again."
        )
        self._stop("trials wait for each other, and cannot be saved", error)

    def _put_away(self, state: TrialRun) -> None:
        """Give its memory back; it will go on from the generation that was just written."""
        if state.job.trial not in self._floor.open:
            return
        if state.is_dirty:
            self._unsaved.add(state.job.trial)
            return
        self._unsaved.clear()
        self._floor.forget(state)
        state.close()
        state.progress = None
        state.leave_home()
        state.restore = str(Path(self._settings.directory) / state.saved_path)
        self._floor.begin_deferred()

    def _begin_again(self, state: TrialRun) -> None:
        self._unsaved.discard(state.job.trial)
        self._floor.leave(state)
        self._floor.begin(state)

    def _next_halt(self, state: TrialRun) -> int | None:
        """The step at which it waits next; None where it trains to its end."""
        assert self._search is not None
        if state.lost_step is not None:
            return state.lost_step
        trial, total, every = state.job.trial, state.total, self._every[state.job.trial]
        rung = self._search.next_rung(trial, max(1, -(-state.step // every)))
        if self._seating is not None:  # where it gets a new seat it stops, decided or not
            rung = self._seating.next_rung(state, every, rung)
        if rung is None:
            return None
        step = rung * every
        return step if total is None or step < total else None

    def _unmeasured(self, state: TrialRun) -> str:
        known = ", ".join(sorted(state.metrics)) or "nothing"
        return (
            f"TrialError: the study's pruner compares {self._hunt.metric!r}, and the evaluation "
            f"after step {state.step} measured {known}. Let the recipe's data return validation "
            "batches, or leave the pruner out."
        )
