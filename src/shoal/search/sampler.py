"""Which points of a space become trials: all of a grid, some of it, or random ones.

[Note: reproducible draws]
Trial i's value of a name comes from a generator seeded by (study seed, i, name), and
only its ``random()`` is used, which Python promises to keep. So trial i does not
depend on how many trials are asked for, nor on other names in the space.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from shoal.core.errors import SpecError
from shoal.core.spec import Scalar, TrialSpec
from shoal.search.space import Choice, Distribution, Space, check_space, is_finite, size

Point = dict[str, Scalar]


def sample(
    space: Space, trials: int | None, seed: int = 0, *, sampler: str | None = None
) -> list[Point]:
    """The hyperparameters of every trial, in the order of their numbers.

    A finite space is a grid: the full product, the first name slowest. Fewer trials
    than points take a seeded subset, whose first members do not depend on their
    number. ``trials=None`` means all of a grid.

    Raises:
        SpecError: more trials than points, an infinite grid, or an unknown sampler.
    """
    distributions = check_space(space)
    finite = is_finite(distributions)
    kind = _sampler_kind(sampler, finite)
    _check_trials(trials)
    if kind == "grid":
        if not finite:
            raise SpecError(_infinite(distributions))
        return [_point(distributions, i) for i in _grid_indices(distributions, trials, seed)]
    if trials is None:
        raise SpecError("how many trials? This space is sampled at random: give trials=N.")
    return [_draw(distributions, seed, number) for number in range(trials)]


def trials_of(
    space: Space, trials: int | None, seed: int = 0, sampler: str | None = None
) -> tuple[TrialSpec, ...]:
    """Every trial of a study: its number, hyperparameters and seed.

    A trial's seed is ``hp["seed"]`` if the space has one, else ``seed`` plus its number.
    """
    points = sample(space, trials, seed, sampler=sampler)
    return tuple(
        TrialSpec(number=number, hp=hp, seed=_trial_seed(hp, seed + number))
        for number, hp in enumerate(points)
    )


def _trial_seed(hp: Point, default: int) -> int:
    seed = hp.get("seed", default)
    if type(seed) is not int or seed < 0:
        raise SpecError(
            f"the hyperparameter 'seed' is a trial's seed, a whole number from 0, got {seed!r}."
        )
    return seed


def _sampler_kind(sampler: Any, finite: bool) -> str:
    if sampler is None:
        return "grid" if finite else "random"
    if sampler in ("grid", "random"):
        return str(sampler)
    raise SpecError(
        f"sampler={sampler!r} cannot be used yet: only None, 'grid' and 'random' are there. "
        "'tpe' and optuna's samplers will come with the extra shoal[search]."
    )


def _check_trials(trials: Any) -> None:
    if trials is not None and (type(trials) is not int or trials < 1):
        raise SpecError(f"trials is a whole number from 1, got {trials!r}.")


def _infinite(distributions: dict[str, Distribution]) -> str:
    name = next(n for n, d in distributions.items() if not isinstance(d, Choice))
    return (
        f"sampler='grid' needs a finite space, but {name!r} is "
        f"{type(distributions[name]).__name__}. Use choice(...) there, or sampler='random'."
    )


def _grid_indices(
    distributions: dict[str, Distribution], trials: int | None, seed: int
) -> Iterator[int]:
    points = size(distributions)
    if trials is not None and trials > points:
        raise SpecError(
            f"{trials} trials were asked for, but the space has only {points} points. Ask for at "
            f"most {points}, add values, or repeat points with 'seed': choice(0, 1, ...)."
        )
    if trials is None or trials == points:
        return iter(range(points))
    return _shuffled(points, trials, random.Random(f"{seed}-grid"))


def _shuffled(points: int, count: int, rng: random.Random) -> Iterator[int]:
    """The first ``count`` of a shuffle of ``range(points)``, in memory of ``count``."""
    moved: dict[int, int] = {}
    for i in range(count):
        j = i + int(rng.random() * (points - i))
        yield moved.get(j, j)
        moved[j] = moved.get(i, i)


def _point(distributions: dict[str, Distribution], index: int) -> Point:
    """Point ``index`` of the product, the last name changing fastest."""
    values: Point = {}
    for name, distribution in reversed(distributions.items()):
        assert isinstance(distribution, Choice)
        index, position = divmod(index, len(distribution.values))
        values[name] = distribution.values[position]
    return {name: values[name] for name in distributions}


def _draw(distributions: dict[str, Distribution], seed: int, number: int) -> Point:
    return {
        name: distribution.pick(random.Random(f"{seed}-{number}-{name}").random())
        for name, distribution in distributions.items()
    }
