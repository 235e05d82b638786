"""Resident trials whose passes may be captured: asked for, or measured to be quicker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.core.errors import PlanError, TooLarge
from shoal.core.plan import Job
from shoal.core.spec import ArrayMeasure, JobMeasure, TrialSpec
from shoal.core.technique import Captured
from shoal.core.units import Bytes, Seconds, format_bytes
from shoal.planner.capture import Life, gains, told, why_no_look
from shoal.planner.need import Need, Request, need
from shoal.planning.pipelining import Question
from shoal.planning.planned import Settled
from shoal.runtime.wire.messages import Measure, Measured

Total = Callable[[int | None, int], int | None]
"""Steps of a trial, of the batches of an epoch and those of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capturing:
    """Decides for trials that fit their device.

    ``looks``: whether times mean anything there, and nothing else was asked for.
    """

    request: Request
    budget: Bytes
    devices: int
    total: Total
    looks: bool

    def instead(self, trial: TrialSpec, settled: Settled, trials: int) -> Question:
        """The trial as it was settled, or captured.

        Raises:
            PlanError: it was asked for and cannot be done.
        """
        is_forced = isinstance(self.request.technique, Captured)
        if not is_forced and not self.looks:
            return settled
        life = self._life(settled, trials)
        if not is_forced and (words := why_no_look(life)):
            return _because(settled, f"captured: not tried, {words}")
        needed = need(
            settled.measure, settled.measure.shards, Captured(), self.request, settled.layout
        )
        if not is_forced and needed.total > self.budget:
            return _because(settled, f"captured: there is no room for {_of(needed, self.budget)}")
        found = yield Measure(trial, cut=False, captures=True)
        assert isinstance(found, Measured)
        capture = found.measure.capture
        assert capture is not None
        if is_forced and capture.declined:
            raise PlanError(
                f"trial {trial.number} was asked to train captured, and its pass cannot be: "
                f"{capture.declined}. Use technique='resident', or leave technique= out."
            )
        if is_forced and needed.total > self.budget:
            raise TooLarge(
                f"trial {trial.number} was asked to train captured, which needs "
                f"{_of(needed, self.budget)}: what a pass is compared with comes on top. Use "
                "technique='resident', or give the device more memory."
            )
        taken = is_forced or gains(capture, life)
        settled = _because(settled, told(capture, taken=taken))
        if not taken:
            return settled
        return replace(
            settled,
            technique=Captured(),
            measure=_quicker(settled, Seconds(capture.captured_s - capture.eager_s)),
        )

    def _life(self, settled: Settled, trials: int) -> Life:
        shard, each = settled.measure.shards[0], self.request.micro_batches
        return Life(
            steps=self.total(settled.measure.num_batches, each),
            trials=-(-trials // self.devices),
            step_s=Seconds(each * shard.backward_s + shard.step_s),
            passes=each,
            shares=self.request.prefers != "device",
        )


class LoneWay(NamedTuple):
    """How the trials of a shape would train one by one: as most of them are settled.

    By its code or captured, whichever was measured to be the quicker. ``trials``: those who would.
    """

    captures: bool = False
    told: str = ""
    trials: frozenset[int] = frozenset()

    def first(self, trials: Sequence[TrialSpec]) -> list[TrialSpec]:
        """The same trials, those who train so before the others; one of them is timed."""
        return sorted(trials, key=lambda trial: trial.number not in self.trials)

    def beside(self, arrays: ArrayMeasure) -> tuple[str, ...]:
        """In words, beside arrays that were timed."""
        is_timed = any(not found.declined for found in arrays.widths)
        return (self.told,) if is_timed and self.told else ()


BY_CODE = LoneWay()


def lone_way(jobs: Sequence[Job]) -> LoneWay:
    """Of jobs of one shape, which may be settled differently; of two that are as many, by code."""
    captured = frozenset(job.trial for job in jobs if isinstance(job.technique, Captured))
    captures = 2 * len(captured) > len(jobs)
    mine = captured if captures else frozenset(job.trial for job in jobs) - captured
    some = "" if len(mine) == len(jobs) else f", as {len(mine)} of {len(jobs)} do"
    way = "captured" if captures else "by their code"
    return LoneWay(captures, f"one by one: timed as trials that train {way}{some}", mine)


def _quicker(settled: Settled, by_s: Seconds) -> JobMeasure:
    """The measure, of a pass that takes so much longer, or less."""
    shard = settled.measure.shards[0]
    backward_s = Seconds(max(shard.backward_s + by_s, 1e-6))
    return replace(settled.measure, shards=(replace(shard, backward_s=backward_s),))


def _of(needed: Need, budget: Bytes) -> str:
    return f"{format_bytes(needed.total)} on a device of {format_bytes(budget)}"


def _because(settled: Settled, words: str) -> Settled:
    return replace(settled, why=(*settled.why, words))
