"""At which steps a trial is evaluated, as far as that is known before it runs."""

from __future__ import annotations

from shoal.core.errors import PlanError
from shoal.execution.trial import total_steps
from shoal.planning import Planned
from shoal.runtime.messages import Settings


def steps_between(settings: Settings, num_batches: int | None, accumulate: int) -> int | None:
    """Steps from one evaluation to the next, where they are known."""
    if settings.eval_every is not None:
        return settings.eval_every
    return None if num_batches is None else -(-num_batches // accumulate)


def check_rungs(planned: Planned, settings: Settings) -> None:
    """Refuse a pruner for trials that have no known moments to be pruned at.

    Raises:
        PlanError: data of no known length, or no trial is evaluated before its end.
    """
    evaluations = []
    for job in planned.plan.jobs:
        batches = planned.num_batches[job.trial]
        total = total_steps(settings, batches, job.micro_batches)
        every = steps_between(settings, batches, job.micro_batches)
        if total is None or every is None:
            raise PlanError(
                f"the pruner has to know when trial {job.trial} is evaluated and when it ends, "
                "and its training data does not say how many batches it has. Give it a __len__, "
                "or the study steps= and eval_every=."
            )
        evaluations.append(-(-total // every))
    if evaluations and max(evaluations) < 2:
        raise PlanError(
            "the pruner ends trials between two evaluations, and no trial is evaluated before its "
            "end. Train for more epochs, or give eval_every= fewer steps."
        )
