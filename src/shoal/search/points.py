"""Points that a user has tried first: checked, and completed from a grid.

A point may leave names out. One that belongs to a branch (``when=``) says which branch it means,
so that it is never a matter of chance whether a value is used.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shoal.core.errors import SpecError
from shoal.core.spec import Scalar
from shoal.core.units import counted
from shoal.core.values import is_number
from shoal.search.space import (
    Choice,
    Distribution,
    Integer,
    Point,
    Uniform,
    entries,
    size,
    to_scalar,
    walk,
)

_EXAMPLE = 'points=[{"lr": 1e-3}]'
_SHOWN, _SHORT = 5, 80  # values of a list in a message, characters of a value


def check_points(space: Mapping[str, Distribution], points: Any) -> tuple[Point, ...]:
    """The points as the space has their values; a trial of a report stands for its own.

    Raises:
        SpecError: no list of mappings, or one that is no point of the space; names it.
    """
    if isinstance(points, str | bytes | Mapping) or not isinstance(points, Iterable):
        raise SpecError(
            f"points is a list of dicts, as in {_EXAMPLE}, or of a report's trials, as in "
            f"points=report.ranking()[:5], got {_short(points)}."
        )
    if isinstance(points, set | frozenset):
        raise SpecError(
            f"points={points!r} is a set, whose order may be another one in each run, and with it "
            "the trials' numbers. Give a list."
        )
    return tuple(_checked(space, f"points[{i}]", point) for i, point in enumerate(points))


def is_whole(space: Mapping[str, Distribution], point: Point) -> bool:
    """Whether a point leaves nothing to be drawn."""
    try:
        walk(space, lambda name, _: point[name])
    except KeyError:
        return False
    return True


def complete(space: Mapping[str, Distribution], points: Sequence[Point]) -> list[Point]:
    """The points of a grid that are meant: of those that agree the first that is not taken.

    Whole ones are taken first, whatever their order, also more than once.

    Raises:
        SpecError: all that agree are taken.
    """
    done: list[Point | None] = [
        _in_order(space, p) if is_whole(space, p) else None for p in points
    ]
    taken = {key(point) for point in done if point is not None}
    for index, point in enumerate(points):
        if done[index] is None:
            free = (one for one in agreeing(space, point) if key(one) not in taken)
            if (found := next(free, None)) is None:
                raise SpecError(_all_taken(space, index, point))
            done[index] = found
            taken.add(key(found))
    return [point for point in done if point is not None]


def repeats(points: Iterable[Point]) -> int:
    """How many points are there already when they come."""
    keys = [key(point) for point in points]
    return len(keys) - len(set(keys))


def key(point: Point) -> frozenset[tuple[str, str, str]]:
    """Equal for equal values of equal types."""
    return frozenset((name, type(v).__name__, repr(v)) for name, v in point.items())


def agreeing(space: Mapping[str, Distribution], point: Point) -> Iterator[Point]:
    """All points of a grid with these values, in its order."""
    names = list(space)
    if not names:
        yield {}
        return
    first, rest = names[0], {name: space[name] for name in names[1:]}
    entry = space[first]
    values = [point[first]] if first in point else map(entry.at, range(entry.count))
    for value in values:
        branch = entry.branch(value) if isinstance(entry, Choice) else {}
        for inner in agreeing(branch, point):
            for other in agreeing(rest, point):
                yield {first: value, **inner, **other}


def _in_order(space: Mapping[str, Distribution], point: Point) -> Point:
    """The point with its names in the order of the space."""
    return walk(space, lambda name, _: point[name])


def _all_taken(space: Mapping[str, Distribution], index: int, point: Point) -> str:
    fixed = {name: _only(entry, point[name]) for name, entry in space.items() if name in point}
    count = size({**space, **fixed})
    return (
        f"points[{index}] = {point!r} leaves names out, and all of the grid's "
        f"{counted(count, 'point')} with that are points= already. Leave it out, or name all of "
        "its values: then it is tried once more, from another seed."
    )


def _only(entry: Distribution, value: Scalar) -> Distribution:
    """An entry that has no other value."""
    if isinstance(entry, Choice) and entry.branches:
        return Choice((value,), (entry.branch(value),))
    return Choice((value,))


# -- checks -----------------------------------------------------------------------------------


def _checked(space: Mapping[str, Distribution], where: str, given: Any) -> Point:
    point = given if isinstance(given, Mapping) else getattr(given, "hp", None)
    if not isinstance(point, Mapping):
        raise SpecError(
            f"{where} is a dict of hyperparameters, as in {_EXAMPLE}, or a trial of a report, got "
            f"{_short(given)}."
        )
    found = _values(space, where, point)
    for name in point:
        if name not in found:
            raise SpecError(_no_place(space, where, point, name))
    return found


def _values(space: Mapping[str, Distribution], where: str, point: Mapping[str, Any]) -> Point:
    """Those of the point's values that have a place, as the space has them."""
    found: Point = {}
    for name, entry in space.items():
        if name in point:
            found[name] = _value(f"{where}[{name!r}]", entry, point[name])
            if isinstance(entry, Choice):
                found |= _values(entry.branch(found[name]), where, point)
    return found


def _short(value: object) -> str:
    """What was given, of a report or a table its kind alone."""
    text = repr(value)
    return text if len(text) <= _SHORT else f"a {type(value).__name__}"


def _value(where: str, entry: Distribution, given: Any) -> Scalar:
    """A value as the space has it: 1 where it has 1.0.

    Raises:
        SpecError: it has none like this.
    """
    value = to_scalar(where, given)
    if isinstance(entry, Choice):
        if entry.has(value):
            return value
        like = [one for one in entry.values if is_number(value) and _is_equal(one, value)]
        if len(like) == 1:
            return like[0]
    elif is_number(value):
        assert isinstance(value, int | float)
        if entry.has(value):
            return entry.nearest(float(value)) if isinstance(entry, Uniform) else int(value)
    raise SpecError(
        f"{where} is {given!r}, which is not in the space: {_possible(entry)}. Give a value of "
        "these, or widen the space."
    )


def _is_equal(one: Scalar, number: Any) -> bool:
    return is_number(one) and one == number


def _possible(entry: Distribution) -> str:
    """The values of an entry, in words."""
    if isinstance(entry, Choice):
        some = ", ".join(map(repr, entry.values[:_SHOWN]))
        return f"it has {some}{', ...' * (len(entry.values) > _SHOWN)}"
    kind = "whole numbers" if isinstance(entry, Integer) else "numbers"
    has_step = entry.step != 1 if isinstance(entry, Integer) else entry.step is not None
    step = f" in steps of {entry.step!r}" if has_step else ""
    return f"it has {kind} from {entry.lo!r} to {entry.hi!r}{step}"


def _no_place(
    space: Mapping[str, Distribution], where: str, point: Mapping[str, Any], name: Any
) -> str:
    """Why a name of a point is none of the trial that it would be."""
    known = list(dict.fromkeys(known for known, _ in entries(space)))
    if name in known:
        needs = list(_bringing(space, name))
        unmet = (need for need in needs if point.get(need[0], need) not in need[1])
        choice, values = next(unmet, needs[-1])
        need = " or ".join(f"{choice}={value!r}" for value in values)
        found = f"it has {choice}={point[choice]!r}" if choice in point else f"it has no {choice}"
        return (
            f"{where} has {name}={point[name]!r}, which only trials with {need} have, and "
            f"{found}. Give {need} with it, or leave {name} out."
        )
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"{where} has {name!r}, which is no name of the space; it has "
        f"{', '.join(map(repr, known)) or 'none'}.{hint}"
    )


def _bringing(space: Mapping[str, Distribution], name: str) -> Iterator[tuple[str, list[Scalar]]]:
    """The choices that bring a name, the outermost first, each with the values that do."""
    for choice, entry in space.items():
        if not isinstance(entry, Choice) or not entry.branches:
            continue
        pairs = zip(entry.values, entry.branches, strict=True)
        values = [v for v, branch in pairs if any(known == name for known, _ in entries(branch))]
        if values:
            yield choice, values
        for branch in entry.branches:
            yield from _bringing(branch, name)
