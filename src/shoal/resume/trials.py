"""Which trial stands for which point of a space, and what a new trial is.

[Note: a trial keeps its number] A trial is known by its hyperparameters, not by its
place in a grid: a wider grid gives another order, and the trials that are there keep
their numbers and seeds. A random space can draw a point twice: then the first trial
that has it stands for the first draw, the second one for the second. A clone stands
for no point, whatever its hyperparameters are: it is there because somebody asked.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shoal.core.errors import SpecError
from shoal.core.spec import Scalar
from shoal.resume.record import Origin, StudyRecord, TrialRecord
from shoal.search.sampler import trial_seed

Point = Mapping[str, Scalar]
Key = frozenset[tuple[str, str, str]]


class Pairing(NamedTuple):
    """What is left when every trial has found its point."""

    new: tuple[Point, ...]  # points that no trial stands for, in their order
    missing: tuple[TrialRecord, ...]  # trials whose point is not there, by number


def pair(trials: Sequence[TrialRecord], points: Iterable[Point]) -> Pairing:
    """Each point with the first trial that has its values and types; clones aside."""
    sampled = [trial for trial in trials if trial.origin != "cloned"]
    waiting: defaultdict[Key, deque[TrialRecord]] = defaultdict(deque)
    for trial in sorted(sampled, key=lambda trial: trial.origin != "asked"):
        waiting[point_key(trial.hp)].append(trial)
    new = []
    for point in points:
        same = waiting.get(point_key(point))
        if same:
            same.popleft()
        else:
            new.append(point)
    missing = [trial for same in waiting.values() for trial in same]
    return Pairing(tuple(new), tuple(sorted(missing, key=lambda trial: trial.number)))


def point_key(point: Point) -> Key:
    """Equal for equal values of equal types: 1, 1.0 and True are three points."""
    return frozenset((name, type(v).__name__, repr(v)) for name, v in point.items())


def with_points(record: StudyRecord, points: Iterable[Point], more: int) -> StudyRecord:
    """``record`` with ``more`` trials, of the first of ``points`` that no trial stands for.

    ``points`` are those of the space, the known ones among them: ``record.sampled + more``
    are enough where the space is the same. New trials are ``extended``, and numbered on.
    """
    new = pair(record.trials, points).new[:more]
    return replace(record, trials=record.trials + number_on(record, new, "extended"))


def with_searched(record: StudyRecord, points: Iterable[Point]) -> StudyRecord:
    """``record`` with a trial for each of the points that its sampler came to.

    Seeds follow the places in the search: clones that were made meanwhile change none.
    """
    cloned = sum(trial.origin == "cloned" for trial in record.trials)
    new = number_on(record, points, "searched", less=cloned)
    return replace(record, trials=record.trials + new)


def with_clone(record: StudyRecord, number: int, changes: Point, *, warm: bool) -> StudyRecord:
    """``record`` with one more trial, like trial ``number`` but for ``changes``.

    Raises:
        SpecError: no such trial, an unknown name, or a value of another type.
    """
    parent = record.trial(number)
    checked = {name: _checked(record, parent, name, value) for name, value in changes.items()}
    (clone,) = number_on(record, [{**parent.hp, **checked}], "cloned")
    clone = replace(clone, parent=number, warm=warm)
    return replace(record, trials=(*record.trials, clone))


def number_on(
    record: StudyRecord, points: Iterable[Point], origin: Origin, *, less: int = 0
) -> tuple[TrialRecord, ...]:
    """New trials of ``record`` for ``points``: their numbers follow the last one's.

    Their seeds are the study's plus their numbers, ``less`` so many.

    Raises:
        SpecError: a hyperparameter ``seed`` that is no seed.
    """
    first = 1 + max((trial.number for trial in record.trials), default=-1)
    return tuple(
        TrialRecord(
            number=n, hp=dict(point), seed=trial_seed(point, record.seed + n - less), origin=origin
        )
        for n, point in enumerate(points, start=first)
    )


def kinds_of(points: Iterable[Point], name: str) -> set[type]:
    """The types that a hyperparameter has; a float may be written as a whole number."""
    return {type(point[name]) for point in points if name in point}


def _checked(record: StudyRecord, parent: TrialRecord, name: str, value: Scalar) -> Scalar:
    """A changed value, as the type that the study's own values have."""
    if name not in parent.hp:
        known = ", ".join(map(repr, parent.hp)) or "none"
        raise SpecError(
            f"trial {parent.number} has no hyperparameter {name!r} to change; it has {known}."
        )
    kinds = kinds_of([trial.hp for trial in record.trials], name)
    if type(value) in kinds:
        return value
    if type(value) is int and float in kinds:
        return float(value)
    meant = " or ".join(sorted(kind.__name__ for kind in kinds))
    raise SpecError(
        f"the hyperparameter {name!r} is {meant} in study {record.name!r}, got {value!r}. Give a "
        "value of that type."
    )
