"""At which steps a trial is evaluated, and who can go on from whom: known before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.core.errors import PlanError
from shoal.core.plan import Job
from shoal.core.technique import Pipelined
from shoal.core.units import counted, list_some
from shoal.execution.trial import total_steps
from shoal.memory.layout import TrialLayout
from shoal.planning import Planned, apart, differing, shapes_apart
from shoal.runtime.wire.messages import Settings


def steps_between(settings: Settings, num_batches: int | None, accumulate: int) -> int | None:
    """Steps from one evaluation to the next, where they are known."""
    if settings.eval_every is not None:
        return settings.eval_every
    return None if num_batches is None else -(-num_batches // accumulate)


def check_moments(planned: Planned, settings: Settings) -> list[int]:
    """How often each trial is evaluated; refuse a pruner for one of which nobody knows.

    Raises:
        PlanError: data of no known length.
    """
    evaluations = []
    for job in planned.plan.jobs:
        batches = planned.num_batches[job.trial]
        total = total_steps(settings, batches, job.micro_batches)
        every = steps_between(settings, batches, job.micro_batches)
        if total is None or every is None:
            raise PlanError(
                f"the pruner has to know when trial {job.trial} is evaluated and when it ends, "
                "and its training data does not say how many batches it has. Give it a __len__ "
                "(of a DataLoader over an IterableDataset it is a guess, which nothing goes by), "
                "or the study steps= and eval_every=."
            )
        evaluations.append(-(-total // every))
    return evaluations


def check_rungs(planned: Planned, settings: Settings) -> None:
    """Refuse a pruner for trials that have no known moments to be pruned at.

    Raises:
        PlanError: data of no known length, or no trial is evaluated before its end.
    """
    evaluations = check_moments(planned, settings)
    if evaluations and max(evaluations) < 2:
        raise PlanError(
            "the pruner ends trials between two evaluations, and no trial is evaluated before its "
            "end. Train for more epochs, or give eval_every= fewer steps."
        )


def check_population(planned: Planned, settings: Settings) -> None:
    """Refuse trials that cannot go on from each other's states.

    Raises:
        PlanError: two of them differ in shape, or in how many steps lie between evaluations; or
            one trains with weights that are one step old.
    """
    jobs = planned.plan.jobs
    for job in jobs:
        if isinstance(job.technique, Pipelined) and job.technique.is_stale:
            raise PlanError(
                f"trial {job.trial} of a population with schedule={job.technique.schedule!r}: a "
                "trial that goes on from another's state would have to take over the weights of "
                "the step before too, and no loop says how. Use a synchronous schedule."
            )
    shapes = [_shapes(planned.layouts[job.trial]) for job in jobs]
    steps = [
        steps_between(settings, planned.num_batches[job.trial], job.micro_batches) for job in jobs
    ]
    for place in range(1, len(jobs)):
        if difference := _difference(shapes[0], shapes[place]):
            _refuse(jobs, place, difference, shapes)
        if steps[0] != steps[place]:
            words = f"evaluations are {steps[0]} steps apart there and {steps[place]} here"
            _refuse(jobs, place, words, steps)


def _refuse(jobs: Sequence[Job], place: int, difference: str, kinds: Sequence[object]) -> None:
    numbers = jobs[0].trial, jobs[place].trial
    raise PlanError(apart(numbers, difference, differing(jobs, place, kinds)))


Shapes = dict[str, tuple[tuple[int, ...], str]]


def _shapes(layout: TrialLayout) -> Shapes:
    """Shape and type of everything that is copied, by what it is."""
    parts = [("parameter", f) for shard in layout.shards for f in shard.param.fields]
    parts += [("state", f) for shard in layout.shards for f in shard.state.fields]
    parts += [("buffer", f) for f in layout.buffers.fields]
    return {
        f"{what} {f.spec.name} {f.spec.key}".strip(): (f.spec.shape, f.spec.dtype)
        for what, f in parts
    }


def _difference(one: Shapes, other: Shapes) -> str:
    """The first difference in words; empty where there is none."""
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name):
            return shapes_apart(name, one, other)
    return ""


def check_validated(planned: Planned, metric: str, *, searches: bool, begun: bool) -> Planned:
    """The plan, with a warning of trials that nothing will measure the metric of.

    ``searches``: trials are compared while the study runs; ``begun``: others have been.

    Raises:
        PlanError: it can compare none of them.
    """
    without = planned.unvalidated
    if not without or metric.startswith("train_"):
        return planned
    what = (
        f"metric={metric!r} is measured on validation batches, and Recipe(data=...) returned "
        f"(train, None) for {counted(len(without), 'trial')}: {list_some(without)}"
    )
    if searches and not begun and len(without) == len(planned.plan.jobs):
        raise PlanError(
            f"{what}, so there is nothing to compare them by. Return validation batches, or leave "
            "out the pruner, and a sampler that learns."
        )
    warning = f"{what}, so no leaderboard ranks them. metric='train_loss' would."
    if searches:
        warning = f"{what}: with a pruner they fail at their first evaluation."
    plan = replace(planned.plan, warnings=(*planned.plan.warnings, warning))
    return replace(planned, plan=plan)
