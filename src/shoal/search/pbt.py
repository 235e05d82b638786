"""Population-based training: who copies whom at a rung, and what is changed. Data in, data out.

[Note: exploit and explore]
At a rung the worst trials of a population go on from the states of the best ones (exploit), with
those trials' hyperparameters changed a little (explore):

    value at the rung     0.2   0.3   0.5   0.6   0.7   0.9       quantile = 1/3, "min"
                           ^     ^                 |     |
                           |     +-----------------+     |        each copies one of the best,
                           +-----------------------------+        drawn by seed, trial and rung

Source: Jaderberg et al., "Population Based Training of Neural Networks" (2017): truncation
selection, perturbing or resampling. Here a rung is decided when all are there, so that neither
timing nor devices decide anything.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.aim import metric_rank
from shoal.core.errors import SpecError
from shoal.core.units import counted
from shoal.core.values import is_number, plain
from shoal.search.space import Choice, Distribution, Integer, Point, Uniform

_EXAMPLE = "pruner=shoal.PBT(interval=1, quantile=0.25)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PBT:
    """Population-based training, for ``Study(pruner=...)``: the trials are the population.

    Args:
        interval: Evaluations from one rung to the next.
        quantile: The share of the trials that copy at a rung, and of those they copy from.
        vary: The hyperparameters that change; None for all that have more than one value,
            but ``seed`` and choices that bring others (``when=``).
        perturb: A number is multiplied by one of these, each equally likely; a choice goes to a
            neighbour of its value. What comes of it stays within the space.
        resample: How likely a value is drawn anew from the space instead.

    Raises:
        SpecError: a value that cannot be meant.
    """

    interval: int = 1
    quantile: float = 0.25
    vary: tuple[str, ...] | None = None
    perturb: tuple[float, ...] = (0.8, 1.25)
    resample: float = 0.25

    def __post_init__(self) -> None:
        for name in ("interval", "quantile", "resample"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        for name in ("vary", "perturb"):
            value = getattr(self, name)
            if isinstance(value, list | tuple):  # a set's order may differ from run to run
                object.__setattr__(self, name, tuple(map(plain, value)))
        for is_good, words in (
            (_is_count(self.interval), "interval is a whole number of evaluations from 1"),
            (_is_in(self.quantile, 0, 0.5) and self.quantile > 0, _QUANTILE),
            (_is_in(self.resample, 0, 1), "resample is a probability, from 0 to 1"),
            (self.vary is None or _are(str, self.vary), "vary is a list of names, or None"),
            (_are_factors(self.perturb), "perturb is a list of factors above 0"),
        ):
            if not is_good:
                raise SpecError(f"{words}, got {self!r}. Write for example {_EXAMPLE}.")


_QUANTILE = "quantile is a share of the trials above 0 and up to 0.5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploit:
    """A trial goes on from the state of ``source``, with ``hp`` instead of ``before``."""

    source: int
    hp: Point
    before: Point


def exploits(
    asked: PBT,
    space: Mapping[str, Distribution],
    *,
    mode: str,
    seed: int,
    rung: int,
    values: Mapping[int, float],
    points: Mapping[int, Point],
) -> dict[int, Exploit]:
    """By trial, what it takes over at a rung.

    Args:
        space: What varies, by name: see ``varied``.
        values: The metric there, of the trials that train on.
        points: Their hyperparameters there.
    """
    best, worst = _quantiles(asked, mode, values)
    found = {}
    for trial in worst if best else ():
        draw = random.Random(f"{seed}-pbt-{trial}-{rung}")
        source = best[int(len(best) * draw.random())]
        hp = dict(points[trial])
        for name, distribution in space.items():
            own = random.Random(f"{seed}-pbt-{trial}-{rung}-{name}")
            hp[name] = _explored(asked, distribution, points[source][name], own)
        found[trial] = Exploit(source=source, hp=hp, before=dict(points[trial]))
    return found


def varied(asked: PBT, space: Mapping[str, Distribution]) -> dict[str, Distribution]:
    """The names that explore changes, each with what it is drawn from.

    Raises:
        SpecError: there are none, or one that is asked for cannot change.
    """
    able = {name: entry for name, entry in space.items() if not _why_fixed(name, entry)}
    for name in asked.vary or ():
        if name not in able:
            why = _why_fixed(name, space[name]) if name in space else "is no name of the space"
            raise SpecError(
                f"PBT(vary=...) names {name!r}, which {why}. What can vary here: "
                f"{', '.join(able) or 'nothing'}."
            )
    chosen = able if asked.vary is None else {name: able[name] for name in asked.vary}
    if not chosen:
        raise SpecError(
            "population-based training has nothing to change: no name of the space has more than "
            "one value, 'seed' and choices with when= aside. Give one a range, such as "
            "lr=shoal.log_uniform(1e-4, 1e-1)."
        )
    return chosen


def check_size(asked: PBT, trials: int) -> None:
    """Refuse a population of which nobody would copy.

    Raises:
        SpecError: the quantile of so many trials is less than one.
    """
    if num_copies(asked, trials) < 1:
        least = math.ceil(1 / asked.quantile)
        raise SpecError(
            f"a population of {counted(trials, 'trial')} is too small for "
            f"PBT(quantile={asked.quantile}): "
            f"not one of them is in the worst {asked.quantile:.0%}. Give trials={least} or more, "
            "or a larger quantile, up to 0.5."
        )


def num_copies(asked: PBT, trials: int) -> int:
    """How many of so many trials copy at a rung."""
    return int(trials * asked.quantile + 1e-9)


def _quantiles(asked: PBT, mode: str, values: Mapping[int, float]) -> tuple[list[int], list[int]]:
    """The best and the worst trials; two are enough where others ended."""
    count = max(num_copies(asked, len(values)), int(len(values) > 1))
    order = sorted(values, key=lambda trial: (metric_rank(values[trial], mode), trial))
    best = [trial for trial in order[:count] if metric_rank(values[trial], mode) < math.inf]
    return best, sorted(order[len(order) - count :])


def _explored(
    asked: PBT, distribution: Distribution, value: object, draw: random.Random
) -> int | float | str | bool | None:
    """``value`` changed a little, or another one drawn."""
    if draw.random() < asked.resample:
        return distribution.pick(draw.random())
    if isinstance(distribution, Choice):
        return _neighbour(distribution, value, draw.random())
    assert isinstance(value, int | float)
    factor = asked.perturb[int(len(asked.perturb) * draw.random())]
    if isinstance(distribution, Integer) and distribution.step == 1:
        return _whole(distribution, value, factor)
    return _multiplied(distribution, value, factor)


def _neighbour(choice: Choice, value: object, unit: float) -> int | float | str | bool | None:
    place = next(
        i for i, one in enumerate(choice.values) if type(one) is type(value) and one == value
    )
    place += -1 if unit < 0.5 else 1
    return choice.values[min(max(place, 0), len(choice.values) - 1)]


def _whole(integer: Integer, value: float, factor: float) -> int:
    """Multiplied and rounded; by one at least, where the factor says so."""
    new = round(value * factor)
    if new == value and factor != 1:
        new += 1 if factor > 1 else -1
    return min(max(new, integer.lo), integer.hi)


def _multiplied(entry: Uniform | Integer, value: float, factor: float) -> float:
    """The value of a range that is nearest; by a step at least, where the factor says so."""
    new = entry.nearest(value * factor)
    if entry.step is not None and new == value and factor != 1:
        new = entry.nearest(value + (entry.step if factor > 1 else -entry.step))
    return new


def _why_fixed(name: str, entry: Distribution) -> str:
    """Why explore leaves a name alone; empty where it does not."""
    if name == "seed":
        return "is the trial's own seed, which stays"
    if isinstance(entry, Choice) and entry.branches:
        return "brings other names with it (when=)"
    if isinstance(entry, Choice) and len(entry.values) < 2:
        return "has one value only"
    return ""


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_in(value: Any, low: float, high: float) -> bool:
    return is_number(value) and low <= value <= high


def _are(kind: type, values: object) -> bool:
    return isinstance(values, tuple) and bool(values) and all(type(v) is kind for v in values)


def _are_factors(values: object) -> bool:
    if not isinstance(values, tuple) or not values:
        return False
    return all(_is_in(value, 0, math.inf) and 0 < value < math.inf for value in values)
