"""Which points of a space become trials: all of a grid, some of it, or random ones.

[Note: reproducible draws]
Trial i's value of a name comes from a generator seeded by (study seed, i, name), and
only its ``random()`` is used, which Python promises to keep. So trial i does not
depend on how many trials are asked for, nor on other names in the space.

Points that a user gave are the first trials. The others are drawn as if these were not there,
trial 0 of the draws after the last point: so a study that has trained can be given points and as
many more trials, and keeps those that it has. What a point leaves out has generators of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from shoal.core.errors import SpecError
from shoal.core.spec import Scalar, TrialSpec
from shoal.core.units import counted
from shoal.search.points import complete, key, repeats
from shoal.search.space import (
    Choice,
    Distribution,
    Point,
    Space,
    check_space,
    endless,
    is_finite,
    size,
    walk,
    ways,
)


def sample(
    space: Space,
    trials: int | None,
    seed: int = 0,
    *,
    sampler: str | None = None,
    points: Sequence[Point] = (),
) -> list[Point]:
    """The hyperparameters of every trial, in the order of their numbers.

    A finite space is a grid: the full product, the first name slowest. Fewer trials
    than points take a seeded subset, whose first members do not depend on their
    number. ``trials=None`` means all of a grid. One that is asked for lists the values of ranges
    too, but those that have no end.

    Args:
        points: As ``check_points`` returns them; these come first, and count among the trials.

    Raises:
        SpecError: more trials than points, an infinite grid, or an unknown sampler.
    """
    distributions = check_space(space)
    finite = is_finite(distributions)
    kind = _sampler_kind(sampler, finite)
    check_trials(trials, len(points))
    if kind == "grid":
        check_listable(distributions)
        first = complete(distributions, points)
        taken, rest = {key(point) for point in first}, repeats(first)
        indices = _grid_indices(distributions, trials, seed, taken=len(taken), repeats=rest)
        grid = (_point(distributions, index) for index in indices)
        others = (point for point in grid if key(point) not in taken)
        return [*first, *islice(others, None if trials is None else trials - len(first))]
    if trials is None:
        raise SpecError(_how_many(distributions))
    first = [_draw(distributions, seed, f"point {i}", own) for i, own in enumerate(points)]
    return first + [_draw(distributions, seed, str(i)) for i in range(trials - len(points))]


def trials_of(
    space: Space,
    trials: int | None,
    seed: int = 0,
    sampler: str | None = None,
    points: Sequence[Point] = (),
) -> tuple[TrialSpec, ...]:
    """Every trial of a study: its number, hyperparameters and seed."""
    return specs_of(sample(space, trials, seed, sampler=sampler, points=points), seed)


def specs_of(points: Iterable[Point], seed: int) -> tuple[TrialSpec, ...]:
    """Points as trials, numbered from 0.

    A trial's seed is ``hp["seed"]`` if the space has one, else ``seed`` plus its number.
    """
    return tuple(
        TrialSpec(number=number, hp=hp, seed=trial_seed(hp, seed + number))
        for number, hp in enumerate(points)
    )


def trial_seed(hp: Mapping[str, Scalar], default: int) -> int:
    """The seed of a trial with these hyperparameters.

    Raises:
        SpecError: they have one named so that is no seed.
    """
    seed = hp.get("seed", default)
    if type(seed) is not int or seed < 0:
        raise SpecError(
            f"the hyperparameter 'seed' is a trial's seed, a whole number from 0, got {seed!r}."
        )
    return seed


def _sampler_kind(sampler: Any, finite: bool) -> str:
    assert sampler in (None, "grid", "random"), sampler
    return sampler or ("grid" if finite else "random")


def check_trials(trials: Any, points: int = 0) -> None:
    """Refuse what is no number of trials, or fewer than there are points to be tried first."""
    if trials is not None and (type(trials) is not int or trials < 1):
        raise SpecError(f"trials is a whole number from 1, got {trials!r}.")
    if trials is not None and trials < points:
        raise SpecError(
            f"points= has {counted(points, 'point')}, which count among the trials, and "
            f"trials={trials}. Give trials={points} or more, or fewer points."
        )


def check_listable(distributions: Mapping[str, Distribution]) -> None:
    """Refuse a grid of a space whose points have no end."""
    if name := endless(distributions):
        raise SpecError(
            f"sampler='grid' needs a finite space, but {name!r} is Uniform. Use choice(...) or "
            "uniform(..., step=...) there, or sampler='random'."
        )


def _how_many(distributions: Mapping[str, Distribution]) -> str:
    count = "" if endless(distributions) else counted(size(distributions), "point")
    rest = f", or sampler='grid' for each of its {count}" if count else ""
    return f"how many trials? This space is sampled at random: give trials=N{rest}."


def _grid_indices(
    distributions: dict[str, Distribution],
    trials: int | None,
    seed: int,
    *,
    taken: int = 0,
    repeats: int = 0,
) -> Iterator[int]:
    """The points of a grid in the order of trials, as many as they need beside ``taken`` ones."""
    points = size(distributions)
    most = points + repeats
    if trials is not None and trials > most:
        again = f", {repeats} of which points= repeats" if repeats else ""
        raise SpecError(
            f"{trials} trials were asked for, but the space has only {counted(points, 'point')}"
            f"{again}. "
            f"Ask for at most {most}, add values, or repeat points with 'seed': choice(0, 1, "
            "...)."
        )
    if trials is None or trials == most:
        return iter(range(points))
    return _shuffled(points, min(points, trials + taken), random.Random(f"{seed}-grid"))


def _shuffled(points: int, count: int, rng: random.Random) -> Iterator[int]:
    """The first ``count`` of a shuffle of ``range(points)``, in memory of ``count``."""
    moved: dict[int, int] = {}
    for i in range(count):
        j = i + int(rng.random() * (points - i))
        yield moved.get(j, j)
        moved[j] = moved.get(i, i)


def _point(distributions: Mapping[str, Distribution], index: int) -> Point:
    """Point ``index`` of the product, the last name changing fastest."""
    parts: list[Point] = []
    for name, distribution in reversed(list(distributions.items())):
        index, position = divmod(index, ways(distribution))
        parts.append(_way(name, distribution, position))
    return {name: value for part in reversed(parts) for name, value in part.items()}


def _way(name: str, entry: Distribution, position: int) -> Point:
    """Point ``position`` of an entry and what comes with its values."""
    if not isinstance(entry, Choice) or not entry.branches:
        return {name: entry.at(position)}
    for value, branch in zip(entry.values, entry.branches, strict=True):
        if position < size(branch):
            return {name: value, **_point(branch, position)}
        position -= size(branch)
    raise AssertionError(position)


def _draw(
    distributions: dict[str, Distribution], seed: int, which: str, given: Point | None = None
) -> Point:
    """Draw ``which`` of a seed, with the values that are ``given``."""

    def pick(name: str, distribution: Distribution) -> Scalar:
        if given and name in given:
            return given[name]
        return distribution.pick(random.Random(f"{seed}-{which}-{name}").random())

    return walk(distributions, pick)
