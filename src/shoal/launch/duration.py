"""How long a study is foretold to take."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.core.plan import seconds_of_work
from shoal.execution.announce import steps_of
from shoal.execution.rungs import steps_between
from shoal.planning import Planned
from shoal.runtime.messages import Settings
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
        total, batches = totals[job.trial] or 0, planned.num_batches[job.trial]
        every = steps_between(settings, batches, job.micro_batches) or total
        seconds = float(job.takes_s) * max(0, total - steps.get(job.trial, 0))
        whole[job.trial] = seconds
        likely[job.trial] = seconds * search.likely_part(-(-total // every) if every else 1)
    later = max(0, (search.trials or 0) - known) if search.is_adaptive else 0
    more = 1 + later / max(1, len(whole))
    work = seconds_of_work(planned.plan, {trial: more * s for trial, s in likely.items()})
    return max(work, max(whole.values(), default=0.0))
