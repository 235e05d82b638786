"""Settings that change while trials train: whether those of one shape share an array all the same.

A member of a population takes over another one's hyperparameters, changed a little. Floats may
differ inside an array. A whole number, a word or a flag may be part of a shape (a width, a class
of activation) or not (the steps of a schedule, the name of a norm's order that only the loss
reads): nobody can tell by its type. So a trial of the shape is described with every combination
that may come, and the facts are compared (``fusion/matching/match.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shoal.core.errors import PlanError, last_words
from shoal.core.spec import Scalar, TrialSpec
from shoal.core.units import counted
from shoal.fusion.matching.lengths import joined, kind_in, with_kind
from shoal.fusion.matching.match import Signature, first_difference
from shoal.planning.asking import Asking
from shoal.runtime.wire.messages import Describe, Described
from shoal.search.space import Choice, Distribution, Integer

MOST = 64
"""Combinations that are looked at: each costs building a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What may come of settings that are not floats, by name; ``values`` in the space's order.

    ``count`` is how many combinations there are.
    """

    values: Mapping[str, tuple[Scalar, ...]]
    count: int

    def points(self) -> Iterator[dict[str, Scalar]]:
        """Every combination."""
        for point in itertools.product(*self.values.values()):
            yield dict(zip(self.values, point, strict=True))


def changes_of(space: Mapping[str, Distribution]) -> Changes:
    """What the names of ``space`` that are not always floats may come to be."""
    sizes = {name: size for name, entry in space.items() if (size := _size(entry))}
    count = math.prod(sizes.values())
    if count > MOST:
        return Changes(values=dict.fromkeys(sizes, ()), count=count)
    return Changes(values={name: _values(space[name]) for name in sizes}, count=count)


def _size(entry: Distribution) -> int:
    """How many values; 0 where all of them are floats."""
    if isinstance(entry, Integer):
        return entry.count
    if isinstance(entry, Choice) and any(type(value) is not float for value in entry.values):
        return len(entry.values)
    return 0


def _values(entry: Distribution) -> tuple[Scalar, ...]:
    if isinstance(entry, Integer):
        return tuple(map(entry.at, range(entry.count)))
    assert isinstance(entry, Choice)
    return entry.values


def why_apart(
    changes: Changes,
    trial: TrialSpec,
    signature: Signature,
    asking: Asking,
    *,
    wished: str | None,
) -> str:
    """Why trials that change so share no array; "" where whatever comes is of one shape.

    Args:
        trial: One of them, and its ``signature``.
        wished: The width that was asked for, in words; None: none was.

    Raises:
        PlanError: a width was asked for, and they share no array.
    """
    why = _why_apart(changes, trial, signature, asking)
    if why and wished is not None:
        raise PlanError(
            f"fuse={wished} with population-based training that varies "
            f"{', '.join(changes.values)}: {why}. Name what an array may differ in with "
            "PBT(vary=...), or leave fuse out."
        )
    return why


def _why_apart(changes: Changes, trial: TrialSpec, signature: Signature, asking: Asking) -> str:
    if changes.count > MOST:
        return (
            f"{', '.join(changes.values)} may come to be any of "
            f"{counted(changes.count, 'combination')} on the way, and no more than {MOST} are "
            "looked at, whether they keep the shape of the array"
        )
    for point in changes.points():
        hp = {**trial.hp, **point}
        if repr(hp) == repr(dict(trial.hp)):  # 1 and True are two values
            continue
        words = ", ".join(f"{name}={value!r}" for name, value in point.items())
        reply = asking.answer(Describe((replace(trial, hp=hp),), arrays=True))
        if not isinstance(reply, Described):
            return f"a trial may come to have {words}, with which it cannot be described: {reply}"
        if error := reply.errors.get(trial.number):
            last = last_words(error)
            return f"a trial may come to have {words}, with which it cannot be built: {last}"
        theirs, kind = reply.arrays[trial.number], kind_in(signature)
        if joined(reply.batches.get(trial.number, ""), kind) == kind:
            theirs = with_kind(theirs, kind)
        if difference := first_difference(signature, theirs):
            return f"a trial may come to have {words}, and be of another shape: {difference}"
    return ""
