"""What a schedule counts: steps, where its user may have meant epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from shoal.core.values import is_number
from shoal.recipes.schedules import EachEvaluation, Schedules
from shoal.runtime.wire.messages import Pace

_COUNTS = {
    CosineAnnealingLR: "T_max",
    CosineAnnealingWarmRestarts: "T_0",
    ExponentialLR: "gamma",
    LinearLR: "total_iters",
    MultiStepLR: "milestones",
    OneCycleLR: "total_steps",
    PolynomialLR: "total_iters",
    StepLR: "step_size",
}


def paces_of(schedule: Any) -> tuple[Pace, ...]:
    """What torch's own schedules count that are stepped once for each step of a trial.

    Of a SequentialLR what the last one counts, which goes by all steps but the first ones; unless
    it may be stepped only so often.
    """
    found = ((one, _pace(_last(one))) for one in _stepped(schedule))
    return tuple(
        pace
        for one, pace in found
        if pace is not None and (type(one) is not SequentialLR or pace.option != "total_steps")
    )


def _last(schedule: Any) -> Any:
    while type(schedule) is SequentialLR:
        schedule = schedule._schedulers[-1]
    return schedule


def _stepped(schedule: Any) -> Iterator[Any]:
    """Those that go by all steps; what is in a SequentialLR goes by some."""
    inside: Any = ()
    if isinstance(schedule, EachEvaluation):
        return
    if isinstance(schedule, Schedules):
        inside = schedule.members.values()
    elif type(schedule) is ChainedScheduler:
        inside = schedule._schedulers
    else:
        yield schedule
    for one in inside:
        yield from _stepped(one)


def _pace(schedule: Any) -> Pace | None:
    option = _COUNTS.get(type(schedule))
    if option is None:
        return None
    count, gamma = getattr(schedule, option), getattr(schedule, "gamma", None)
    if isinstance(schedule, LinearLR) and not schedule.end_factor < schedule.start_factor:
        return None  # a warm-up, which may be short
    if option == "milestones":  # torch counts how often each is there
        count = max(count, default=0)
    if not is_number(count):
        return None
    return Pace(type(schedule).__name__, option, count, gamma if is_number(gamma) else None)
