"""What a step with stale weights is worth: both rules of training on the same data.

[Note: how it is told]
Losses of single steps are noise, so each curve is a mean over the last ``window`` steps. The
efficiency is the step at which the synchronous curve first is as low as the stale one ends, over
the steps of both. A training that is stuck (its curve no lower than half-way before, and far
above the other, or not finite) has none: it looks like a slow one, and is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from shoal.core.errors import SpecError
from shoal.core.stale import Stale
from shoal.core.units import counted
from shoal.core.values import flag, items, plain, whole
from shoal.plain import plain_2bw_loop, plain_loop
from shoal.recipes.recipe import HP, Recipe

FEWEST = 20  # steps: of fewer a curve says nothing
WINDOW = 10  # of the steps one in so many is the window
FLAT = 0.01
"""A second half that wins less than this part of what synchronous steps won in all is flat,"""
BEHIND = 0.1
"""and stuck where so much of it is still missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedEfficiency:
    """Of one seed: the loss of each step of both trainings, and what the stale steps were worth.

    ``reached`` is at which step the synchronous training was first as low as the stale one ended,
    and ``efficiency`` that over the steps; 0 where stale steps made no progress.
    """

    seed: int
    synchronous: tuple[float, ...]
    stale: tuple[float, ...]
    window: int
    reached: float
    is_stuck: bool

    @property
    def efficiency(self) -> float:
        """The part of a synchronous step's progress, from 0 to 1."""
        return 0.0 if self.is_stuck else min(1.0, self.reached / len(self.stale))


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleEfficiency:
    """What stale steps were worth, seed by seed; ``efficiency`` is the median."""

    predict: bool
    seeds: tuple[SeedEfficiency, ...]

    @property
    def efficiency(self) -> float:
        """The part of a synchronous step's progress that a stale step made; 0: none."""
        return median(one.efficiency for one in self.seeds)

    @property
    def stuck(self) -> tuple[int, ...]:
        """The seeds whose stale training made no progress."""
        return tuple(one.seed for one in self.seeds if one.is_stuck)

    def stale(self) -> Stale:
        """For ``Recipe(stale=...)``.

        Raises:
            SpecError: stale steps made no progress with one of the seeds.
        """
        if self.stuck:
            raise SpecError(f"{self} Leave Recipe(stale=...) out, or lower the learning rate.")
        return Stale(efficiency=self.efficiency, predict=self.predict)

    def __str__(self) -> str:
        steps, guess = len(self.seeds[0].stale), " and a guess of the newer ones" * self.predict
        head = f"{steps} steps with weights one step old{guess}"
        if self.stuck:
            seeds = ", ".join(map(str, self.stuck))
            which = f" with {len(self.stuck)} of {counted(len(self.seeds), 'seed')} ({seeds})"
            return f"{head} made no progress{which}: the loss does not fall any more."
        each = ", ".join(f"{one.reached:.0f}" for one in self.seeds)
        return (
            f"{head} came as far as {each} synchronous ones"
            f"{' (seed by seed)' * (len(self.seeds) > 1)}: an efficiency of {self.efficiency:.2f}."
        )


def stale_efficiency(
    recipe: Recipe,
    hp: HP,
    *,
    steps: int,
    predict: bool = False,
    micro_batches: int | None = None,
    seeds: Sequence[int] = (0,),
    threads: int = 1,
) -> StaleEfficiency:
    """How many synchronous steps come to the loss that stale ones reach in ``steps``, as a part.

    Trains ``plain_loop`` and ``plain_2bw_loop`` on the same data in this process, for each seed;
    some hundred steps say something, and what they say holds for these hyperparameters, above all
    for the learning rate, and for this part of a training. Compared are losses of training steps,
    smoothed over a tenth of them. ``micro_batches`` are those of ``Pipelined``.

    Raises:
        SpecError: fewer than 20 steps, no seeds, or batches that cannot be cut so.
        TrialError: a loss of the synchronous training is not finite, and the recipe minds.
    """
    steps = _enough(steps)
    seeds = _seeds(seeds)
    predict = flag("stale_efficiency(predict=...)", predict)
    options: dict[str, Any] = {
        "steps": steps,
        "pieces": _pieces(recipe, micro_batches),
        "threads": whole("stale_efficiency(threads=...)", threads, 1),
    }
    found = []
    for seed in seeds:
        plain = plain_loop(recipe, hp, seed, **options)
        how = {**options, "on_nonfinite": "ignore", "predict": predict}
        stale = plain_2bw_loop(recipe, hp, seed, **how)
        found.append(compared(seed, plain.losses, stale.losses))
    return StaleEfficiency(predict=predict, seeds=tuple(found))


def _enough(steps: int) -> int:
    found = plain(steps)
    if type(found) is not int or found < FEWEST:
        raise SpecError(
            f"stale_efficiency(steps={steps!r}): fewer than {FEWEST} steps say nothing of a "
            "curve. Give some hundred, a whole number."
        )
    return found


def _seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    name = "stale_efficiency(seeds=...)"
    found = items(name, seeds, "seeds=(0, 1)")
    if not found:
        raise SpecError(f"{name} has one seed or more, got none.")
    return tuple(whole(f"a seed of {name}", seed, 0) for seed in found)


def _pieces(recipe: Recipe, micro_batches: int | None) -> int:
    micros = recipe.accumulate if micro_batches is None else plain(micro_batches)
    if type(micros) is not int or micros < 1 or micros % recipe.accumulate:
        raise SpecError(
            f"micro_batches={micro_batches!r} is no multiple of the {recipe.accumulate} batches "
            "of a step (accumulate=): each batch is cut into as many pieces."
        )
    if micros > recipe.accumulate and not recipe.splittable:
        raise SpecError(
            f"micro_batches={micro_batches} cuts batches, and the recipe does not say that they "
            "may be. Give Recipe(splittable=True), or leave it out."
        )
    return micros // recipe.accumulate


def compared(seed: int, synchronous: Sequence[float], stale: Sequence[float]) -> SeedEfficiency:
    """Two trainings of as many steps, by their losses.

    Raises:
        SpecError: the synchronous one made no progress.
    """
    steps = len(stale)
    window = max(5, steps // WINDOW)
    plain, old = smoothed(synchronous, window), smoothed(stale, window)
    end, half = old[-1], old[steps // 2 - 1]
    won = plain[0] - min(plain)
    if not won > 0:
        raise SpecError(
            f"the synchronous training of seed {seed} made no progress in {steps} steps: its "
            f"loss was {plain[0]:.4g} and is {plain[-1]:.4g}. There is nothing to compare with; "
            "give it more steps or another learning rate."
        )
    is_flat, is_behind = half - end < FLAT * won, end - min(plain) > BEHIND * won
    is_stuck = not math.isfinite(end) or (is_flat and is_behind)
    return SeedEfficiency(
        seed=seed,
        synchronous=tuple(synchronous),
        stale=tuple(stale),
        window=window,
        reached=0.0 if is_stuck else first_below(plain, end),
        is_stuck=is_stuck,
    )


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Means over the last ``window`` losses, inf where one of them is not finite."""
    finite = [loss if math.isfinite(loss) else math.inf for loss in losses]
    return [
        math.fsum(some) / len(some)
        for end in range(1, len(finite) + 1)
        for some in [finite[max(0, end - window) : end]]
    ]


def first_below(curve: Sequence[float], level: float) -> float:
    """At which step, from 1 and between two of them, a curve first is as low; its end if never."""
    lowest = list(accumulate(curve, min))
    for step, value in enumerate(lowest):
        if value <= level:
            if step == 0:
                return 1.0
            before = lowest[step - 1]
            return step + (before - level) / (before - value)
    return float(len(curve))
