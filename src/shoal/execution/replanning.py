"""Plans that are made while trials run: smaller jobs for what did not fit, and more trials."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from shoal.core import event as events
from shoal.core.errors import PlanError, ShoalError, last_words
from shoal.core.plan import Job, of_its_arrays
from shoal.core.spec import DeviceSpec, TrialSpec
from shoal.core.technique import Pipelined, Spilled, Technique, asks_by_shard
from shoal.execution.floor import Floor
from shoal.execution.ladder import (
    MAX_RUNGS,
    at_its_place,
    grow,
    nothing_smaller,
    over_fewer,
    same_bits,
    stepped_here,
    steps_alike,
    techniques,
)
from shoal.execution.trial import TrialRun
from shoal.planning import Abandoned, Planned, Planner, Receive
from shoal.runtime.pool import Worker
from shoal.runtime.wire.messages import Order


class Replanning:
    """Measures and decides again; one plan at a time.

    Args:
        planner: Of the study.
        receive: Where its answers come from while the run goes on.
        is_ending: Whether the run ends, so that nobody needs another plan.
    """

    def __init__(
        self, floor: Floor, planner: Planner, receive: Receive, is_ending: Callable[[], bool]
    ) -> None:
        self._floor, self._planner, self._receive = floor, planner, receive
        self._is_ending = is_ending
        self._at_work: Planner | None = None
        self.trials: frozenset[int] = frozenset()  # that are being measured now

    @property
    def is_busy(self) -> bool:
        """Whether a plan is under way."""
        return self._at_work is not None

    def asked(self, worker: Worker) -> Order | None:
        """What a worker measures for it now, if anything."""
        return self._at_work.asked.get(worker) if self._at_work is not None else None

    def plan(self, trials: Sequence[TrialSpec], planner: Planner | None = None) -> Planned:
        """Plan while other trials run.

        Raises:
            PlanError, SpecError, TrialError, WorkerError: they cannot be run, or the run ends.
        """
        if self._is_ending():
            raise Abandoned("the study is being stopped: nothing is planned any more.")
        assert not self.is_busy
        self._at_work = planner or self._planner
        self.trials = frozenset(trial.number for trial in trials)
        try:
            return self._at_work.plan(trials, receive=self._receive)
        finally:
            self._at_work, self.trials = None, frozenset()

    def make_smaller(self, state: TrialRun, error: str, growth: float) -> None:
        """Give a trial that ran out of memory another job of the same bits, if there is one.

        It has no device, and will go on from its newest generation. It fails with the bytes it
        needs where there is none. When the run ends before that is known, it stays where it is.
        """
        self._replan(state, error, lambda: self._planned_smaller(state, growth))

    def make_whole(self, state: TrialRun, error: str) -> None:
        """Give a trial whose weights travelled as bfloat16 a job in which they do not.

        It has no device, and will go on from its newest generation, which has the plain bits.
        """
        self._replan_spilled(state, error, transfer="fp32", master=None)

    @property
    def chose_order(self) -> bool:
        """Whether nobody asked for shards to run all micro-batches of a step in one visit."""
        return not self._planner.is_by_shard

    def make_plain(self, state: TrialRun, error: str) -> None:
        """Give a trial whose shards ran all micro-batches of a step in one visit the plain order.

        It has no device, and will go on from its newest generation, which has the plain bits.
        """
        self._replan_spilled(state, error, order="micro")

    def _replan_spilled(self, state: TrialRun, error: str, **changes: Any) -> None:
        """Give a trial a job with these ``changes``, or the first rung that fits with them."""
        job = state.job
        assert isinstance(job.technique, Spilled)
        is_open = self.chose_order and asks_by_shard(job.technique)  # it was rehearsed as it was
        other = replace(
            job.technique,
            order=None if is_open else job.technique.order,
            shards=len(job.shards),
            optimizer=state.place,
            keep_turn=None,
            keep_gradients=None,
            keep_head=None,
            keep_activations=None,
            spill_activations=None,
        )
        other = replace(other, **changes)
        smaller = techniques(other, len(job.shards), state.place, has_neighbours=True)
        self._replan(state, error, lambda: self._first_rung(state, [other, *smaller]))

    def over_fewer(self, state: TrialRun, devices: Sequence[DeviceSpec]) -> Planned:
        """A job of the same bits for a gang that has only these devices.

        It may be given a lease meanwhile, if another device comes back.

        Raises:
            PlanError: there is none.
            SpecError, TrialError, WorkerError: it cannot be measured now, or the run ends.
        """
        technique = state.job.technique
        if not isinstance(technique, Pipelined):
            raise PlanError("how many devices there are is part of its numerics key.")
        if technique.width > 1 and len(devices) < 2 * technique.width:
            raise PlanError(
                f"how many copies there are is part of its numerics key, and {technique.width} "
                f"copies of 2 stages or more take {2 * technique.width} devices; "
                f"{len(devices)} are there."
            )
        options = over_fewer(state.job, len(devices), self._planner.accumulate)
        refusal = f"no form of it for {len(devices)} has the same bits."
        return self._first_planned(state, options, refusal, devices)

    def _replan(self, state: TrialRun, error: str, plan: Callable[[], Planned]) -> None:
        floor, trial = self._floor, state.job.trial
        try:
            planned = plan()
        except ShoalError as reason:
            if not self._is_ending():
                floor.fail(trial, f"{error.strip()}\n\n{_sentence(reason)}")
            return
        if trial in floor.open:
            self.take_job(state, planned, error)

    def _planned_smaller(self, state: TrialRun, growth: float) -> Planned:
        """The first rung that fits.

        Raises:
            PlanError: none does, or too many were tried.
        """
        job = state.job
        state.rungs += 1
        if state.rungs > MAX_RUNGS:
            raise PlanError(
                f"it was planned smaller {MAX_RUNGS} times, the last time for batches that take "
                f"{state.growth:.1f} times as much as the first one, and that was not enough."
            )
        state.growth = grow(state.growth, growth)
        crowded = self._floor.plan.active > 1
        return self._first_rung(
            state, techniques(job.technique, len(job.shards), state.place, has_neighbours=crowded)
        )

    def _first_rung(self, state: TrialRun, options: Iterable[Technique]) -> Planned:
        job = state.job
        return self._first_planned(state, at_its_place(options, job), nothing_smaller(job))

    def _first_planned(
        self,
        state: TrialRun,
        options: Iterable[Technique],
        none_left: str,
        devices: Sequence[DeviceSpec] | None = None,
    ) -> Planned:
        refusal: ShoalError = PlanError(none_left)
        for technique in options:
            try:
                return self._planned_as(state, technique, devices)
            except PlanError as error:
                refusal = error
        raise refusal

    def _planned_as(
        self, state: TrialRun, technique: Technique, devices: Sequence[DeviceSpec] | None
    ) -> Planned:
        job = state.job
        spec = TrialSpec(number=job.trial, hp=job.hp, seed=job.seed)
        planned = self.plan([spec], self._planner.forced(technique, state.growth, devices))
        for failure in planned.failures.values():
            raise PlanError(f"it cannot be measured again:\n{failure}")
        _check_key(job, planned.plan.jobs[0])
        return planned

    def take_job(self, state: TrialRun, planned: Planned, error: str) -> None:
        """Have a trial that has no device go on with another job, as soon as there is one."""
        (job,) = planned.plan.jobs
        job = replace(job, numerics={**job.numerics, **of_its_arrays(state.job)})
        state.rejob(job, planned.layouts[job.trial])
        self._floor.tell(
            events.TrialReplanned(
                time=time.time(),
                trial=job.trial,
                step=state.step,
                reason=last_words(error),
                technique=type(job.technique).__name__,
                shards=job.parts,
                peak_bytes=job.peak_bytes,
            )
        )
        self._floor.begin(state)


def _check_key(before: Job, after: Job) -> None:
    now = {**after.numerics, **of_its_arrays(before)}
    if not same_bits(before.numerics, now):
        raise PlanError(
            f"trial {before.trial} would train to other bits: its numerics key is "
            f"{dict(before.numerics)}, and would be {dict(after.numerics)}."
        )
    if not steps_alike(before, after):
        here, would = sorted(stepped_here(before)), sorted(stepped_here(after))
        raise PlanError(
            f"trial {before.trial} would train to other bits: layers {here} step on the device, "
            f"the others on the host, and layers {would} would."
        )


def _sentence(reason: ShoalError) -> str:
    return f"{type(reason).__name__}: it was planned again, and cannot be run: {reason}"
