"""What a schedule counts: steps, where its user may have meant epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    MultiStepLR,
    OneCycleLR,
    StepLR,
)

from shoal.core.values import is_number
from shoal.runtime.messages import Pace
from shoal.schedules import EachEvaluation, Schedules

_COUNTS = {
    CosineAnnealingLR: "T_max",
    MultiStepLR: "milestones",
    OneCycleLR: "total_steps",
    StepLR: "step_size",
}


def paces_of(schedule: Any) -> tuple[Pace, ...]:
    """What torch's own schedules count that are stepped once for each step of a trial."""
    return tuple(pace for one in _stepped(schedule) if (pace := _pace(one)) is not None)


def _stepped(schedule: Any) -> Iterator[Any]:
    """Those that go by all steps; of a SequentialLR each goes by some."""
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
    if option == "milestones":  # torch counts how often each is there
        count = max(count, default=0)
    if not is_number(count):
        return None
    return Pace(type(schedule).__name__, option, count, gamma if is_number(gamma) else None)
