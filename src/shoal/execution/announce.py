"""The events that say how a plan will run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from shoal.core import event as events
from shoal.core.plan import Job
from shoal.core.spec import TrialSpec
from shoal.execution.trial import total_steps
from shoal.planning import Planned
from shoal.runtime.wire.messages import Settings


def planned_events(
    planned: Planned,
    trials: Iterable[TrialSpec],
    totals: Mapping[int, int | None],
    *,
    recipe: int,
) -> list[events.Event]:
    """One TrialPlanned for each trial, also for those that cannot be built.

    ``recipe``: which of the study's recipes it goes on with.
    """
    jobs = {job.trial: job for job in planned.plan.jobs}
    return [_planned(trial, jobs.get(trial.number), totals, recipe) for trial in trials]


def _planned(
    trial: TrialSpec, job: Job | None, totals: Mapping[int, int | None], recipe: int
) -> events.TrialPlanned:
    return events.TrialPlanned(
        time=time.time(),
        trial=trial.number,
        hp=dict(trial.hp),
        seed=trial.seed,
        technique=type(job.technique).__name__ if job else "",
        shards=job.parts if job else 1,
        steps=totals.get(trial.number),
        peak_bytes=job.peak_bytes if job else 0,
        numerics=dict(job.numerics) if job else {},
        parent=trial.parent,
        warm=trial.warm,
        why=job.why if job else (),
        recipe=recipe,
    )


def steps_of(planned: Planned, settings: Settings) -> dict[int, int | None]:
    """The steps of each trial, where they are known before it runs."""
    return {
        job.trial: total_steps(settings, planned.num_batches[job.trial], job.micro_batches)
        for job in planned.plan.jobs
    }
