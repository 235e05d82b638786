"""What a study asks of its search: which sampler, which pruner, and whether they can serve it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import SpecError
from shoal.core.spec import TrialSpec
from shoal.core.units import counted
from shoal.core.values import whole
from shoal.search.judge import Judge, check_decides
from shoal.search.library import is_of, load_optuna, require_packages
from shoal.search.parameters import parameters_of
from shoal.search.pbt import PBT, check_size, num_copies, varied
from shoal.search.points import check_points, complete, repeats
from shoal.search.population import Population
from shoal.search.rules import ETA, Halving, Median, Rule, likely_part, num_brackets
from shoal.search.sampler import check_listable, check_trials, specs_of, trials_of
from shoal.search.search import LAG, Search
from shoal.search.space import (
    Choice,
    Distribution,
    Point,
    check_space,
    entries,
    find_equal,
    is_finite,
    size,
)
from shoal.search.suggest import Suggester, check_repeats, num_points
from shoal.source import lasting_name

GENERATION = 9
"""Trials that are decided about together; a number of three's powers halves without a rest."""
_SAMPLERS = (None, "grid", "random", "tpe")
_PRUNERS = (None, "asha", "hyperband", "median")
_RULES = "'asha', 'hyperband', 'median', a shoal.PBT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A study's search, checked; ``sampler`` and ``pruner`` are a name or an object.

    ``evaluations`` is how many a trial has, where that is known before its data is read.
    ``points`` are what the first trials have.
    """

    name: str
    space: Mapping[str, Distribution]
    sampler: Any
    pruner: Any
    generation: int
    trials: int | None
    seed: int
    mode: str
    evaluations: int | None
    points: tuple[Point, ...] = ()

    @property
    def is_adaptive(self) -> bool:
        """Whether trials depend on the results of others."""
        return self.sampler not in ("grid", "random")

    @property
    def is_plain(self) -> bool:
        """Whether every trial is known from the start and trains to its end."""
        return not self.is_adaptive and self.pruner is None

    @property
    def varied(self) -> tuple[str, ...]:
        """The hyperparameters that change while a trial trains; none but in a population."""
        return tuple(self.varied_space)

    @property
    def varied_space(self) -> Mapping[str, Distribution]:
        """The same, each with what it is drawn from."""
        return varied(self.pruner, self.space) if isinstance(self.pruner, PBT) else {}

    @property
    def total(self) -> int | None:
        """How many trials there are to be at most; None where all of a grid are.

        A sampler that tries each point once may have fewer of them than trials are asked for.
        """
        known = (self.sampler, self.space, self.points)
        points = num_points(*known) if self.is_adaptive else None
        return min((n for n in (self.trials, points) if n is not None), default=None)

    @property
    def num_waiting(self) -> int | None:
        """How many trials may have begun and not ended, where they wait for each other.

        0 where none waits, None for all of them.
        """
        if self.pruner is None:
            return 0
        return (LAG + 1) * self.generation if self.is_adaptive else None

    def begin(self) -> Search | Population | None:
        """The search at its start, no trial known yet; None for a plain one."""
        if self.is_plain:
            return None
        if isinstance(self.pruner, PBT):
            return Population(self.pruner, self.varied_space, mode=self.mode, seed=self.seed)
        rule = self._rule()
        if not self.is_adaptive:
            return Search(self.generation, rule)
        suggester = Suggester(self._make_sampler(), self.space, self.mode, self.points)
        assert self.total is not None
        return Search(self.generation, rule, suggester, self.total, self.trials)

    def first_trials(self) -> tuple[TrialSpec, ...]:
        """The trials that depend on no result.

        Raises:
            SpecError: more trials than points of a grid, or the sampler cannot serve the space.
        """
        if not self.is_adaptive:
            return trials_of(self.space, self.trials, self.seed, self.sampler, self.points)
        sampler, total = self._make_sampler(), self.total or 0
        check_repeats(sampler, self.space, self.mode, total, self.points)
        search = self.begin()
        assert search is not None
        return specs_of(search.more(), self.seed)

    def words(self) -> Mapping[str, str]:
        """What of the search a study's record keeps; nothing of a plain one."""
        if self.is_plain:
            return {}
        words = {"sampler": _name(self.sampler), "pruner": _name(self.pruner)}
        for what, value in (("sampler", self.sampler), ("pruner", self.pruner)):
            if not isinstance(value, str | PBT | None):
                words[f"{what} parameters"] = parameters_of(value)
        if isinstance(self.pruner, PBT):
            space = ", ".join(f"{name}={entry!r}" for name, entry in self.space.items())
            return words | {"population": str(self.population), "space": space}
        if self.is_adaptive and self.points:
            words["points"] = json.dumps(self.points)
        return words | {"generation": str(self.generation)}

    def explain(self, known: int) -> tuple[str, ...]:
        """What a plan says of it; ``known`` is how many trials it plans."""
        lines = []
        if self.points:
            one = len(self.points) == 1
            them = "trial 0 has" if one else f"trials 0 to {len(self.points) - 1} have"
            lines.append(f"  points: {them} the values of points=")
        if self.is_adaptive:
            lines.append(
                f"  search: {_name(self.sampler)}; {known} of "
                f"{counted(self.total or 0, 'trial is', 'trials are')} known now{self._fewer()}, "
                f"the others come in generations of {self.generation}, each when all but the one "
                "before it have ended; predicted as if they were like these"
            )
        if isinstance(self.pruner, PBT):
            lines.append(
                f"  population: {_how_often(self.pruner.interval)} all "
                f"{self.population} trials wait, and the worst "
                f"{num_copies(self.pruner, self.population)} go on from states of the best, with "
                f"{', '.join(self.varied)} changed"
            )
        elif self.pruner is not None:
            lines.append(
                f"  pruning: {_name(self.pruner)}; {self._rungs()} a trial waits for its "
                f"generation of {self.generation}, and may end there; predicted as if "
                f"{f'one of {ETA} went on' if self.halves else 'all went on'}"
            )
        return tuple(lines)

    @property
    def halves(self) -> bool:
        """Whether it is known how many trials go on at rungs."""
        return self.pruner in ("asha", "hyperband")

    def likely_part(self, evaluations: int) -> float:
        """What part of so many evaluations a trial makes on average, as far as that is known."""
        if not self.halves:
            return 1.0
        brackets = num_brackets(evaluations) if self.pruner == "hyperband" else 1
        return likely_part(evaluations, brackets)

    @property
    def population(self) -> int:
        """How many trials there are, where all are known from the start."""
        return self.trials or size(self.space) + repeats(complete(self.space, self.points))

    def _fewer(self) -> str:
        is_less = self.trials is not None and self.total != self.trials
        return f" ({self.trials} were asked for, and it has no more points)" * is_less

    def _rungs(self) -> str:
        return "after 1, 3, 9, ... evaluations" if self.pruner == "asha" else "after evaluations"

    def _make_sampler(self) -> Any:
        if self.sampler != "tpe":
            return self.sampler
        return load_optuna("sampler='tpe'").samplers.TPESampler(seed=self.seed % 2**32)

    def _rule(self) -> Rule | None:
        if self.pruner is None:
            return None
        if self.pruner == "asha":
            return Halving(self.mode)
        if self.pruner == "hyperband":
            assert self.evaluations is not None
            return Halving(self.mode, num_brackets(self.evaluations))
        if self.pruner == "median":
            return Median(self.mode)
        return Judge(self.pruner, self.mode, self.name, self.space)


def check_search(
    *,
    name: str,
    space: Any,
    sampler: Any,
    pruner: Any,
    generation: int | None,
    trials: int | None,
    seed: int,
    mode: str,
    metric: str,
    evaluations: int | None,
    points: Any = (),
) -> Wanted:
    """A study's search, from what its user wrote.

    Raises:
        SpecError: an unknown name, Optuna is missing, or what is asked for cannot be served.
    """
    distributions = check_space(space)
    if not (sampler in _SAMPLERS if isinstance(sampler, str | None) else _is_sampler(sampler)):
        raise SpecError(_unknown("sampler", sampler, "'grid', 'random', 'tpe'"))
    if not (pruner in _PRUNERS if isinstance(pruner, str | None) else _is_pruner(pruner)):
        raise SpecError(_unknown("pruner", pruner, _RULES))
    if sampler is None:
        sampler = "grid" if is_finite(distributions) else "random"
    if sampler == "grid":
        check_listable(distributions)
    wanted = Wanted(
        name=name,
        space=distributions,
        sampler=sampler,
        pruner=pruner,
        generation=_checked_generation(generation, pruner),
        trials=trials,
        seed=seed,
        mode=mode,
        evaluations=evaluations,
        points=check_points(distributions, points),
    )
    if generation is not None and wanted.is_plain:
        raise SpecError(
            f"generation={generation!r} is asked for, and nothing waits for the results of "
            f"others here: sampler={sampler!r} and no pruner. Leave generation out."
        )
    if wanted.is_adaptive:
        _check_adaptive(wanted)
    if pruner is not None:
        _check_pruner(wanted, metric)
    if isinstance(pruner, PBT):
        _check_population(wanted, pruner)
    return wanted


def _check_adaptive(wanted: Wanted) -> None:
    check_trials(wanted.trials, len(wanted.points))
    if wanted.total is None:
        raise SpecError(
            f"how many trials? Nothing says how many points sampler={_name(wanted.sampler)!r} "
            "has: give trials=N, the most there are to be."
        )
    if not wanted.space:
        raise SpecError(
            f"sampler={_name(wanted.sampler)!r} has nothing to choose: space is empty."
        )
    for name, entry in entries(wanted.space):
        if isinstance(entry, Choice) and (pair := find_equal(entry.values)):
            raise SpecError(
                f"{name!r} has the values {pair[0]!r} and {pair[1]!r}, which Optuna takes for "
                f"one, so that sampler={_name(wanted.sampler)!r} would not know which of them did "
                "well. Leave one out, or write text and make values of it in the recipe."
            )
    if wanted.sampler == "tpe":
        load_optuna("sampler='tpe'")


def _check_pruner(wanted: Wanted, metric: str) -> None:
    require_packages("pruner", wanted.pruner)
    label = f"pruner={_name(wanted.pruner)!r}"
    if metric == "train_loss":
        raise SpecError(
            f"{label} compares what trials reach at their evaluations, and metric='train_loss' "
            "is none of these. Give the recipe validation data and metric='valid_loss', or a "
            "metric of the recipe's own."
        )
    if wanted.evaluations is not None and wanted.evaluations < 2:
        raise SpecError(
            f"{label} ends trials between two evaluations, and {metric!r} is evaluated only once, "
            "at the end. Train for more epochs, or give eval_every= so many steps that there are "
            "some before the end."
        )
    if wanted.pruner == "hyperband" and wanted.evaluations is None:
        raise SpecError(
            f"{label} has to know how often a trial is evaluated. Give epochs= without "
            "eval_every=, or steps= with it; pruner='asha' needs to know neither."
        )
    if not isinstance(wanted.pruner, str | PBT):
        check_decides(wanted.pruner, wanted.mode, wanted.name, wanted.space)


def _check_population(wanted: Wanted, asked: PBT) -> None:
    if wanted.is_adaptive:
        raise SpecError(
            f"sampler={_name(wanted.sampler)!r} learns from what a trial's hyperparameters came "
            "to, and in a population they change while it trains. Begin it with sampler='random' "
            "or 'grid'."
        )
    varied(asked, wanted.space)
    check_trials(wanted.trials, len(wanted.points))
    if wanted.trials is not None or wanted.sampler == "grid":
        check_size(asked, wanted.population)
    if wanted.evaluations is not None and asked.interval >= wanted.evaluations:
        raise SpecError(
            f"PBT(interval={asked.interval}) has no rung before the end: a trial is evaluated "
            f"{wanted.evaluations} times. Give a smaller interval, or evaluate more often "
            "(eval_every=)."
        )


def _how_often(interval: int) -> str:
    return "after each evaluation" if interval == 1 else f"every {interval} evaluations"


def _checked_generation(generation: Any, pruner: Any) -> int:
    if generation is None:
        return GENERATION
    if isinstance(pruner, PBT):
        raise SpecError(
            f"generation={generation!r} is asked for, and population-based training compares all "
            "trials of the study at each rung. Leave generation out."
        )
    return whole("generation", generation, 1)


def _is_sampler(value: object) -> bool:
    return is_of(value, "samplers", "BaseSampler")


def _is_pruner(value: object) -> bool:
    return isinstance(value, PBT) or is_of(value, "pruners", "BasePruner")


def _unknown(what: str, value: object, names: str) -> str:
    if isinstance(value, type):
        return f"{what}={value.__name__} is a class. Give an object of it: {value.__name__}(...)."
    kind = "" if isinstance(value, str) else f", a {type(value).__name__}"
    return (
        f"{what}={value!r}{kind} is not known: {what} is None, {names}, or an object of "
        f"optuna.{what}s (pip install 'optuna>=5')."
    )


def _name(value: Any) -> str:
    if value is None or isinstance(value, str):
        return str(value or "none")
    if isinstance(value, PBT):
        return repr(value)
    return f"{lasting_name(type(value).__module__).split('.')[0]}'s {type(value).__name__}"
