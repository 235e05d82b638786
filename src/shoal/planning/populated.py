"""Whether trials can go on from each other's states, as those of a population do: before any is
measured, by what each makes.

What may come of hyperparameters on the way is made too: of choices and whole numbers one at a
time, and of all floats together the ends and the middle of their ranges. A float that gives other
shapes only between these is not seen; on the way it fails its trial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from shoal.core.errors import PlanError
from shoal.core.spec import Scalar, TrialSpec
from shoal.memory.layout import TrialLayout
from shoal.planning.asking import Asking
from shoal.planning.changing import MOST
from shoal.runtime.wire.messages import Describe, Described, Made, Noticed
from shoal.search.space import Choice, Distribution, Integer, Uniform

Space = Mapping[str, Distribution]
_SOME = 8
"""Whole numbers of a wide range that are looked at, but for its upper end."""
_PLACES = (0.0, 0.5, 1.0)
_NEAR_ZERO = 1e-6
"""Where in the ranges of floats is looked; and how far into one that ends at 0, where code may
turn something off: no value that is multiplied or drawn comes to be 0."""


class Member(Protocol):
    """A trial of a population."""

    @property
    def hp(self) -> Mapping[str, Scalar]: ...


def check_members(trials: Sequence[TrialSpec], noticed: Mapping[int, Noticed]) -> None:
    """Refuse trials that make optimizers of several kinds, or models of several shapes.

    Raises:
        PlanError: names the first two, what they make, and the hyperparameters that tell.
    """
    found = [(t, noticed[t.number].made) for t in trials if t.number in noticed]
    members, kinds = [t for t, _ in found], [made for _, made in found]
    for place in range(1, len(members)):
        if words := difference(kinds[0], kinds[place]):
            numbers = members[0].number, members[place].number
            raise PlanError(apart(numbers, words, differing(members, place, kinds)))


def check_ways(space: Space, trial: TrialSpec, noticed: Noticed, asking: Asking) -> frozenset[str]:
    """Refuse a space of which a value changes what a trial makes.

    Returns the parameters that a trial trains with some values and not with others.

    Raises:
        PlanError: names the hyperparameter, its two values and what is made with them.
    """
    trained = [noticed.made.trained if noticed.made else frozenset[str]()]
    for changed in (*_ways(space, trial.hp), *_float_ways(space, trial.hp)):
        made = _made_with(changed, trial, asking)
        if made is not None:
            trained.append(made.trained)
        words = difference(noticed.made, made)
        if not words:
            continue
        for name in changed if len(changed) > 1 else ():  # of several floats one may do it
            alone = {name: changed[name]}
            if found := difference(noticed.made, _made_with(alone, trial, asking)):
                changed, words = alone, found
                break
        raise PlanError(_words_of_way(changed, trial, words))
    return frozenset().union(*trained) - frozenset.intersection(*trained)


def check_unfreezing(changing: frozenset[str], layouts: Mapping[int, TrialLayout]) -> None:
    """Refuse trials in shards that may freeze or unfreeze parameters; ``changing`` are these.

    Shards have room for gradients of what is trained when they are planned, and a trial that goes
    on later is planned with what it has by then. Who is in one piece has no gradients there.

    Raises:
        PlanError: names a trial, and a parameter.
    """
    for number, layout in layouts.items() if changing else ():
        if any(shard.grad.fields for shard in layout.shards):
            raise PlanError(
                f"{min(changing)!r} is trained with some hyperparameters of this population and "
                f"frozen with others, and trial {number} trains in shards, which have room for "
                "the gradients of what is trained when they are planned. Leave what freezes "
                "parameters out of shoal.PBT(vary=...), run a study for each value of it, or use "
                "technique='resident' if the model fits."
            )


def _made_with(changed: Mapping[str, Scalar], trial: TrialSpec, asking: Asking) -> Made | None:
    """What of a trial is made with some values changed; None where it cannot be built so."""
    asked = replace(trial, hp={**trial.hp, **changed})
    reply = asking.answer(Describe((asked,), shapes=True))
    other = reply.noticed.get(trial.number) if isinstance(reply, Described) else None
    return None if other is None else other.made


def _words_of_way(changed: Mapping[str, Scalar], trial: TrialSpec, difference: str) -> str:
    names = ", ".join(changed)
    become = " and ".join(f"{name} becomes {value!r}" for name, value in changed.items())
    own = " and ".join(repr(trial.hp[name]) for name in changed)
    each = "it" if len(changed) == 1 else "them"
    return (
        f"a trial of this population cannot go on from another's state if {become}: with {own}, "
        f"which trial {trial.number} has, and that, {difference}. Leave {names} out of "
        f"shoal.PBT(vary=...), and run a study for each value of {each}."
    )


def _ways(space: Space, hp: Mapping[str, Scalar]) -> Iterator[dict[str, Scalar]]:
    """What each hyperparameter may become; of many whole numbers some, the ends among them."""
    for name, entry in space.items():
        for value in _values(entry):
            if name in hp and repr(value) != repr(hp[name]):  # 1 and True are two values
                yield {name: value}


def _float_ways(space: Space, hp: Mapping[str, Scalar]) -> Iterator[dict[str, Scalar]]:
    """What the floats may become, all at once: most change no shape, and a model costs time."""
    ranges = {n: entry for n, entry in space.items() if isinstance(entry, Uniform) and n in hp}
    for place in _PLACES if ranges else ():
        yield {name: _value_at(entry, place) for name, entry in ranges.items()}


def _value_at(entry: Uniform, place: float) -> float:
    ends = {0.0: entry.lo, 1.0: entry.hi}
    inside = {0.0: _NEAR_ZERO, 1.0: 1 - _NEAR_ZERO}.get(place, place)
    return ends.get(place) or entry.pick(inside)


def _values(entry: Distribution) -> Sequence[Scalar]:
    if isinstance(entry, Choice):
        return entry.values[:MOST]
    if not isinstance(entry, Integer):
        return ()
    stride = max(1, (entry.count - 1) // _SOME)
    return sorted({*map(entry.at, range(0, entry.count, stride)), entry.hi})


def difference(one: Made | None, other: Made | None) -> str:
    """The first difference of what is made, in words; empty where there is none."""
    if one is None or other is None:
        return ""
    if one.optimizer != other.optimizer:
        return f"the optimizer is {one.optimizer} there and {other.optimizer} here"
    for name in sorted(one.shapes.keys() | other.shapes.keys()):
        if one.shapes.get(name) != other.shapes.get(name):
            return shapes_apart(name, one.shapes, other.shapes)
    return ""


def shapes_apart(name: str, *both: Mapping[str, tuple[tuple[int, ...], str]]) -> str:
    """In words what a name is in each of two."""
    shapes = [found[0] if (found := one.get(name)) else "nothing" for one in both]
    return f"{name!r} is {shapes[0]} there and {shapes[1]} here"


def apart(numbers: tuple[int, int], difference: str, names: Sequence[str]) -> str:
    """That of two trials the second cannot go on from the first one's state; by ``names``."""
    is_kind = difference.startswith(("'state ", "the optimizer "))
    why = "; an optimizer of another kind or with other options keeps other state" * is_kind
    return (
        f"trial {numbers[1]} cannot go on from the state of trial {numbers[0]}, as trials of a "
        f"population do: {difference}{why}. Their hyperparameters differ in "
        f"{', '.join(names) or 'nothing'}. Have the space leave out what changes shapes or "
        "lengths, and run a study for each value of it."
    )


def differing(members: Sequence[Member], place: int, kinds: Sequence[object]) -> list[str]:
    """The hyperparameters, with their values, that tell a member from the first."""
    first, one = members[0], members[place]
    changed = [n for n in {**first.hp, **one.hp} if first.hp.get(n) != one.hp.get(n)]
    return [
        f"{name} ({first.hp.get(name)!r} there and {one.hp.get(name)!r} here)"
        for name in _telling(changed, members, place, kinds) or changed
    ]


def _telling(
    names: Sequence[str], members: Sequence[Member], place: int, kinds: Sequence[object]
) -> list[str]:
    """Of ``names`` those whose value says which of the two kinds a trial is, with fewest values.

    A rate that is another one in each trial says so too, and is not what makes them differ.
    """
    both = (kinds[0], kinds[place])
    of_both = [(one, kind) for one, kind in zip(members, kinds, strict=True) if kind in both]
    counts = {}
    for name in names:
        of: dict[str, object] = {}
        if all(of.setdefault(repr(one.hp.get(name)), kind) == kind for one, kind in of_both):
            counts[name] = len(of)
    told = [name for name in counts if counts[name] == min(counts.values())]
    return [name for name in told if not _is_each_trials_own(name, members)] or told


def _is_each_trials_own(name: str, members: Sequence[Member]) -> bool:
    return len({repr(one.hp.get(name)) for one in members}) == len(members)
