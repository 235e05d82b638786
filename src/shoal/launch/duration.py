"""How long a study is foretold to take."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.core.plan import Job, seconds_of_work
from shoal.execution.announce import steps_of
from shoal.execution.rungs import steps_between
from shoal.planning import Planned
from shoal.runtime.wire.messages import Settings
from shoal.search.wanted import Wanted


def foretold_s(
    planned: Planned, settings: Settings, search: Wanted, steps: Mapping[int, int], known: int
) -> float:
    """Seconds that training takes, validation apart; no less than the longest trial.

    ``steps`` are those that trials have behind them. Trials that a sampler has not suggested
    yet, all but ``known``, are taken to be like those that are planned.
    """
    totals = steps_of(planned, settings)
    whole, likely = {}, {}
    for job in planned.plan.jobs:
        seconds = float(job.takes_s) * max(0, (totals[job.trial] or 0) - steps.get(job.trial, 0))
        whole[job.trial] = seconds
        likely[job.trial] = seconds * _part(job, planned, settings, search, totals[job.trial])
    later = max(0, (search.total or 0) - known) if search.is_adaptive else 0
    more = 1 + later / max(1, len(whole))
    work = seconds_of_work(planned.plan, {trial: more * s for trial, s in likely.items()})
    return max(work, max(whole.values(), default=0.0))


def likely_part(planned: Planned, settings: Settings, search: Wanted) -> float:
    """What part of all of its steps a trial does on average, as far as its search's rule says."""
    totals = steps_of(planned, settings)
    jobs = planned.plan.jobs
    parts = [_part(job, planned, settings, search, totals[job.trial]) for job in jobs]
    return sum(parts) / len(parts) if parts else 1.0


def _part(
    job: Job, planned: Planned, settings: Settings, search: Wanted, total: int | None
) -> float:
    batches = planned.num_batches[job.trial]
    every = steps_between(settings, batches, job.micro_batches) or total
    return search.likely_part(-(-total // every) if total and every else 1)
