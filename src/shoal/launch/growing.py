"""What an order to add trials makes of a study's record: data in, data out.

[Note: an order that is repeated]
Who types a command again, since it was cut short or its answer was lost, does not know how
far it came. So the trials are written into the record together with the order that made them,
and the next order is held against it:

    an equal order's trials have not all ended    they go on, and none is added
    they have, or no order was equal, ``again``   trials are added: it is a new wish
    ``to``                                        those are added that are missing

Equal are extensions by as many trials, and clones of one trial with the same values, both
warm or both cold. What ``to`` added is equal to nothing: it needs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from shoal.control import CloneTrial, ExtendTrials
from shoal.core.errors import SpecError
from shoal.core.spec import Scalar
from shoal.core.units import counted, named_trials
from shoal.resume import (
    Addition,
    StudyRecord,
    TrialRecord,
    point_key,
    with_clone,
)

Order = ExtendTrials | CloneTrial
MorePoints = Callable[[StudyRecord, int], StudyRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """What came of an order: the study's record, and a line for whoever gave it.

    ``trials`` are those that it added; where not ``is_new``, those that it goes on with.
    """

    record: StudyRecord
    trials: tuple[int, ...]
    is_new: bool
    text: str


def grow(
    record: StudyRecord,
    order: Order,
    more_points: MorePoints,
    *,
    ended: Collection[int],
    time: float,
    claimed: Collection[int] = (),
) -> Grown:
    """Do what is ordered, unless it was done before and is not over.

    Args:
        more_points: The record with so many more trials of the space.
        ended: The trials that train no more.
        time: Now, by the wall clock.
        claimed: Trials of other orders of the same call, which are not this one's.

    Raises:
        SpecError: it cannot be meant, or the space has too few points.
    """
    if isinstance(order, ExtendTrials) and order.to is not None:
        return _grow_to(record, order.to, more_points, ended)
    wanted = _likeness_of_order(record, order)
    equal = [
        addition
        for addition in record.additions
        if _likeness(record, addition) == wanted and not set(addition.trials) & set(claimed)
    ]
    unfinished = [addition for addition in equal if not set(addition.trials) <= set(ended)]
    if unfinished and not order.again:
        return _going_on(record, unfinished[-1])
    if isinstance(order, CloneTrial):
        new = _with_clone(record, order)
    else:
        new = more_points(record, order.trials or 0)
    trials = tuple(trial.number for trial in new.trials[len(record.trials) :])
    added = replace(new, additions=(*record.additions, Addition(time=time, trials=trials)))
    past = f"; {_say_past(equal[-1])}" if equal and not unfinished else ""
    text = f"added {named_trials(trials)}{past}"
    return Grown(record=added, trials=trials, is_new=True, text=text)


def of_today(order: Order, record: StudyRecord, now: Mapping[str, Scalar] | None) -> Order:
    """The order, with the hyperparameters that a clone's parent has ``now`` among its changes.

    In a population they are others than on record; None where they are not.
    """
    if now is None or not isinstance(order, CloneTrial):
        return order
    begun = record.trial(order.trial).hp
    changed = {name: value for name, value in now.items() if value != begun[name]}
    return replace(order, changes={**changed, **order.changes})


def _grow_to(
    record: StudyRecord, to: int, more_points: MorePoints, ended: Collection[int]
) -> Grown:
    there = len(record.trials)
    if to < there:
        raise SpecError(
            f"cannot extend study {record.name!r} to {counted(to, 'trial')}: it has {there}, and "
            "none is "
            f"ever removed. Give --to {there} or more, or stop some: shoal stop STUDY TRIAL."
        )
    if to == there:
        open_ = [trial.number for trial in record.trials if trial.number not in ended]
        rest = f"; going on with {named_trials(open_)}" if open_ else ""
        text = f"study {record.name!r} has {counted(there, 'trial')} already: none was added{rest}"
        return Grown(record=record, trials=(), is_new=False, text=text)
    new = more_points(record, to - there)
    trials = tuple(trial.number for trial in new.trials[there:])
    text = f"added {named_trials(trials)}: study {record.name!r} has {to} in all"
    return Grown(record=new, trials=trials, is_new=True, text=text)


def _likeness_of_order(record: StudyRecord, order: Order) -> Hashable:
    if isinstance(order, ExtendTrials):
        return order.trials
    return _likeness_of_clone(_with_clone(record, order).trials[-1])


def _likeness(record: StudyRecord, addition: Addition) -> Hashable:
    first = record.trial(addition.trials[0])
    return _likeness_of_clone(first) if first.origin == "cloned" else len(addition.trials)


def _likeness_of_clone(clone: TrialRecord) -> Hashable:
    return clone.parent, clone.warm, point_key(clone.hp)


def _with_clone(record: StudyRecord, order: CloneTrial) -> StudyRecord:
    return with_clone(record, order.trial, order.changes, warm=order.warm)


# -- in words ---------------------------------------------------------------------------------


def _going_on(record: StudyRecord, addition: Addition) -> Grown:
    was, has, them = ("was", "has not", "it")
    if len(addition.trials) > 1:
        was, has, them = ("were", "have not all", "them")
    text = (
        f"{named_trials(addition.trials)} {was} added by the same command on {_date(addition)} "
        f"and {has} ended; going on with {them} (--again adds more)"
    )
    return Grown(record=record, trials=addition.trials, is_new=False, text=text)


def _say_past(addition: Addition) -> str:
    has = "has" if len(addition.trials) == 1 else "have all"
    name = named_trials(addition.trials)
    return f"{name}, which the same command added on {_date(addition)}, {has} ended"


def _date(addition: Addition) -> str:
    return datetime.fromtimestamp(addition.time).astimezone().strftime("%Y-%m-%d %H:%M")
