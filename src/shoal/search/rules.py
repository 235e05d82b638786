"""Who trains on after a rung: the rules that a name asks for. Data in, data out.

[Note: the same whoever comes first]
Successive halving that decides for each trial when it arrives lets the first one on whatever it
is worth, and another run has another first one. Here a rung is decided for a whole generation at
once, when all of it is there, and beside all generations before it:

    rung 1    0.9  0.5  0.7 | 0.4  0.8  0.6        generations of three, eta = 3
    goes on         *       |  *                   the best 1 of 3, then of the best 2 of 6 those
                                                   of the second generation

Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning" (ASHA, 2020), and
"Hyperband" (2018).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Protocol

from shoal.core.aim import metric_rank
from shoal.search.facts import Facts

ETA = 3
"""Of so many trials at a rung one goes on, to a rung so many times as far."""
_ENOUGH = 5
"""Trials at a rung, from which on their median says something."""


class Rule(Protocol):
    """Decides at rungs.

    ``needs_ends``: a generation is decided only when all but the one before it have ended.
    ``why``: what is to say of a trial that it ends; the metric follows.
    """

    @property
    def why(self) -> str: ...

    @property
    def needs_ends(self) -> bool: ...

    def is_rung(self, trial: int, rung: int) -> bool:
        """Whether the trial is held against others after its evaluation number ``rung``."""
        ...

    def cohort(self, trial: int) -> int:
        """Trials of one number are compared with each other, at the same rungs."""
        ...

    def prune(
        self, rung: int, trials: Sequence[Facts], asked: Collection[int], first: int
    ) -> set[int]:
        """Those of ``asked`` that train no more.

        Args:
            trials: All of this generation and of those before it.
            first: Where the generation before this one begins.
        """
        ...


@dataclass(frozen=True, slots=True)
class Halving:
    """Successive halving: after 1, 3, 9, ... evaluations the best third goes on.

    ``brackets`` is how many kinds of trials there are: those of bracket b are first compared
    after 3**b evaluations. One bracket is ASHA, as many as fit a trial's length are Hyperband.
    """

    needs_ends = False
    why = "others did better in"

    mode: str
    brackets: int = 1

    def cohort(self, trial: int) -> int:
        """Each bracket's share of the trials is Hyperband's, in every beginning of them."""
        weights = bracket_weights(self.brackets)
        return _share(trial % sum(weights), weights)

    def is_rung(self, trial: int, rung: int) -> bool:
        return _is_power(rung) and rung >= ETA ** self.cohort(trial)

    def prune(
        self, rung: int, trials: Sequence[Facts], asked: Collection[int], first: int
    ) -> set[int]:
        pruned: set[int] = set()
        for bracket in {self.cohort(trial) for trial in asked}:
            there = [
                (metric_rank(value, self.mode), trial)
                for trial, facts in enumerate(trials)
                if (value := facts.at(rung)) is not None and self.cohort(trial) == bracket
            ]
            kept = {t for r, t in sorted(there)[: max(1, len(there) // ETA)] if r < math.inf}
            pruned |= {t for t in asked if self.cohort(t) == bracket} - kept
        return pruned


@dataclass(frozen=True, slots=True)
class Median:
    """After each evaluation those end whose best so far is worse than the median there."""

    needs_ends = False
    why = "others did better in"

    mode: str

    def is_rung(self, trial: int, rung: int) -> bool:
        return True

    def cohort(self, trial: int) -> int:
        return 0

    def prune(
        self, rung: int, trials: Sequence[Facts], asked: Collection[int], first: int
    ) -> set[int]:
        values = [value for facts in trials if (value := facts.at(rung)) is not None]
        there = [metric_rank(value, self.mode) for value in values]
        middle = median(there) if len(there) >= _ENOUGH else math.inf
        so_far = {t: trials[t].until(rung).values() for t in asked}
        best = {t: min(metric_rank(v, self.mode) for v in found) for t, found in so_far.items()}
        return {t for t in asked if best[t] > middle or best[t] == math.inf}


def num_brackets(evaluations: int) -> int:
    """How many brackets trials of so many evaluations have."""
    brackets = 1
    while ETA**brackets <= evaluations:
        brackets += 1
    return brackets


def bracket_weights(brackets: int) -> tuple[int, ...]:
    """How many trials of each bracket Hyperband begins; the first halves most often."""
    most = brackets - 1
    return tuple(-(-brackets * ETA ** (most - b) // (most - b + 1)) for b in range(brackets))


def likely_part(evaluations: int, brackets: int) -> float:
    """What part of so many evaluations a trial makes on average, where one of ETA goes on."""
    weights = bracket_weights(brackets)
    made = sum(w * _likely(evaluations, ETA**b) for b, w in enumerate(weights))
    return made / sum(weights) / evaluations


def _likely(evaluations: int, rung: int) -> float:
    """Evaluations of a trial that is first compared after ``rung`` of them."""
    part, made, before = 1.0, 0.0, 0
    while rung < evaluations:
        made += part * (rung - before)
        part, before, rung = part / ETA, rung, rung * ETA
    return made + part * (evaluations - before)


@cache
def _share(index: int, weights: tuple[int, ...]) -> int:
    """Whose turn number ``index`` is, where turns are dealt out evenly by weight."""
    total, dealt = sum(weights), [0] * len(weights)
    place = 0
    for turn in range(index + 1):
        place = max(range(len(weights)), key=lambda b: weights[b] * (turn + 1) - dealt[b] * total)
        dealt[place] += 1
    return place


def _is_power(rung: int) -> bool:
    while rung % ETA == 0:
        rung //= ETA
    return rung == 1
