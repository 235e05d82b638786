"""Points from a sampler of Optuna's, one after another, each told what it may know.

The library's study lives in memory and is forgotten with the process. Who goes on with a search
has the same questions asked again in the same order, with the results that are on record: a
sampler with a seed gives the same answers. Where it does not (another version of the library),
what is on record is what counts: ``replace_last``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.errors import SpecError
from shoal.core.spec import Scalar
from shoal.core.values import is_number
from shoal.search.facts import Facts
from shoal.search.library import (
    copied,
    distributions_of,
    is_of,
    load_optuna,
    new_study,
    require_packages,
    suggest,
)
from shoal.search.points import is_whole, repeats
from shoal.search.space import (
    Choice,
    Distribution,
    Point,
    Uniform,
    endless,
    entries,
    size,
    to_scalar,
    walk,
)

_REHEARSED = (
    Facts({}, values=[1.0, 0.5], how="finished", value=0.5),
    Facts({}, values=[1.0], how="pruned"),
    Facts({}, how="failed"),
)
"""What comes of the trials that a sampler is asked for before any trains."""
_MOST_REHEARSED = 128


class Suggester:
    """Asks a copy of ``sampler``; points come in the order of trials.

    Args:
        points: What the first trials have, as ``check_points`` returns it: the sampler is asked
            for what they leave out, and told of them as of any trial.

    Attributes:
        name: The sampler's class.
        is_over: The sampler had the study stop: it has no more points.
    """

    def __init__(
        self,
        sampler: Any,
        space: Mapping[str, Distribution],
        mode: str,
        points: Sequence[Point] = (),
    ) -> None:
        self._optuna = load_optuna("this sampler")
        self.name = type(sampler).__name__
        self.is_over = False
        require_packages("sampler", sampler)
        self._space, self._points = space, points
        self._study = new_study(self._optuna, mode, sampler=copied("sampler", sampler))
        self._study.stop = self._stop  # Optuna's own works in ``optimize`` alone
        self._trials: list[Any] = []

    def __len__(self) -> int:
        return len(self._trials)

    def suggest(self) -> Point:
        """The next trial's point.

        Raises:
            SpecError: the sampler raised, or suggests what the space does not have.
        """
        number = len(self._trials)
        given = self._points[number] if number < len(self._points) else {}
        trial = self._ask(given)
        self._trials.append(trial)
        if not is_whole(self._space, given):  # as in Optuna, which draws nothing else for these
            self._check_relative(trial)
        return walk(self._space, lambda name, of: self._value(trial, name, of))

    def _check_relative(self, trial: Any) -> None:
        """Refuse what a sampler drew at once that is not in the space."""
        known: dict[str, list[Distribution | Scalar]] = {}
        for name, entry in entries(self._space):  # a name may stand in several branches
            known.setdefault(name, []).append(entry)
        relative = self._quietly(lambda: dict(trial.relative_params))  # drawn when it is looked at
        unknown = sorted(relative.keys() - known.keys())
        if unknown:
            raise SpecError(
                f"the sampler {self.name} suggests {unknown[0]!r}, which is no name of the "
                f"space; it has {', '.join(sorted(known))}. Give the sampler the names of the "
                "space."
            )
        for name, value in relative.items():  # Optuna passes over what does not exist
            if not any(_has(of, value) for of in known[name]):
                raise self._not_there(name, value, known[name][0])

    def replace_last(self, point: Point) -> None:
        """The last trial had another point: what is on record counts."""
        optuna, study = self._optuna, self._study
        self._quietly(lambda: study.tell(self._trials[-1], state=optuna.trial.TrialState.FAIL))
        frozen = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params=point,
            distributions=distributions_of(optuna, self._space, point),
        )
        study.add_trial(frozen)
        self._trials[-1] = optuna.trial.Trial(study, study.get_trials()[-1]._trial_id)

    def tell(self, index: int, facts: Facts) -> None:
        """What came of a trial.

        Raises:
            SpecError: the sampler raised.
        """
        states, trial = self._optuna.trial.TrialState, self._trials[index]
        for rung, value in facts.until().items():
            trial.report(value, rung)
        if facts.how == "pruned":
            self._quietly(lambda: self._study.tell(trial, state=states.PRUNED))
        elif facts.how == "finished" and facts.value is not None and facts.value == facts.value:
            self._quietly(lambda: self._study.tell(trial, facts.value))
        else:
            self._quietly(lambda: self._study.tell(trial, state=states.FAIL))

    def _stop(self) -> None:
        self.is_over = True

    def _ask(self, given: Point) -> Any:
        if given:
            self._quietly(lambda: self._study.enqueue_trial(given))
        return self._quietly(self._study.ask)

    def _value(self, trial: Any, name: str, of: Distribution) -> Scalar:
        value = self._quietly(lambda: suggest(trial, name, of))
        if not _has(of, value):
            raise self._not_there(name, value, of)
        return to_scalar(name, of.nearest(value) if isinstance(of, Uniform) else value)

    def _not_there(self, name: str, value: Any, of: Distribution | Scalar) -> SpecError:
        return SpecError(
            f"the sampler {self.name} suggests {name}={value!r}, which is not in {of!r}. "
            "Give the sampler the space of the study, or use another one."
        )

    def _quietly(self, work: Any) -> Any:
        """Do what calls the sampler; what it raises is said in words.

        Raises:
            SpecError: it raised.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # its advice is for whoever calls it
                return work()
        except Exception as error:
            raise SpecError(
                f"the sampler {self.name} cannot serve this space: {type(error).__name__}: "
                f"{str(error).rstrip('.')}. shoal's own are sampler='grid', 'random' and 'tpe'."
            ) from error


def check_repeats(
    sampler: Any,
    space: Mapping[str, Distribution],
    mode: str,
    total: int,
    points: Sequence[Point] = (),
) -> None:
    """Refuse a sampler that draws otherwise each time: its study could not be resumed.

    It is told of trials too: one that raises then would end a study that has trained for hours.
    One that draws at random at first is asked until it goes by results, if any of the ``total``
    trials comes so late. So it is of ``points``, which it is given after that: who is given all
    of a point draws nothing.

    Raises:
        SpecError: two copies of it suggest different points, or it raised.
    """
    first, probe = (Suggester(sampler, space, mode) for _ in range(2))
    if _rehearsed(first) != _rehearsed(probe):
        name = type(sampler).__name__
        raise SpecError(
            f"the sampler {name} draws otherwise each time, so that no run could be repeated or "
            f"resumed. Give it a seed: {name}(seed=0)."
        )
    if points:
        probe = Suggester(sampler, space, mode, points)
        _rehearsed(probe)
    more = max(_num_at_random(sampler) + 3, min(len(points), _MOST_REHEARSED))
    for index in range(len(_REHEARSED), min(total - 1, more)):
        if probe.is_over:
            break
        probe.tell(index, Facts({}, values=[1.0], how="finished", value=1.0 / index))
        probe.suggest()


def _rehearsed(probe: Suggester) -> list[Point]:
    """What it suggests, first to last; it is told of what came of the others before the last."""
    drawn = [probe.suggest() for _ in _REHEARSED]
    for index, facts in enumerate(_REHEARSED):
        probe.tell(index, facts)
    return drawn if probe.is_over else [*drawn, probe.suggest()]


def _num_at_random(sampler: Any) -> int:
    """How many trials a sampler of Optuna's draws at random before it goes by results.

    0 where it would take seconds to find out what comes then.
    """
    if is_of(sampler, "samplers", "GPSampler"):
        return 0
    counts = [getattr(sampler, name, 0) for name in ("_n_startup_trials", "_population_size")]
    most = max((count for count in counts if isinstance(count, int)), default=0)
    return most if most <= _MOST_REHEARSED else 0


def num_points(
    sampler: Any, space: Mapping[str, Distribution], points: Sequence[Point] = ()
) -> int | None:
    """How many points a sampler of Optuna's has that tries each once; None of any other.

    One that tries points again while they train (``avoid_premature_stop``) says itself when it
    has tried all of them. Of ``points`` that are tried first those count that are there twice.

    Raises:
        SpecError: it tries all points of a space that is not finite, or takes no ``points``.
    """
    if is_of(sampler, "samplers", "GridSampler"):
        if points:  # it would count none of them as tried, and raises when it is told of some
            raise SpecError(
                "the sampler GridSampler tries the points of its own search_space, and takes no "
                "others. Leave points= out, or use sampler='grid', which begins with them."
            )
        return len(known) if (known := getattr(sampler, "_all_grids", None)) is not None else None
    if not is_of(sampler, "samplers", "BruteForceSampler"):
        return None
    kind = type(sampler).__name__
    if name := endless(space):
        raise SpecError(
            f"the sampler {kind} tries every point of a space, and {name!r} is Uniform, which has "
            "no end of them. Use choice(...), integer(...) or uniform(..., step=...) there, or "
            "another sampler."
        )
    for index, point in enumerate(points):
        if not is_whole(space, point):
            raise SpecError(
                f"the sampler {kind} tries every point of a space once, and points[{index}] = "
                f"{point!r} leaves names out, so that it may come to be one of these. Name all of "
                "its values, or use another sampler."
            )
    if getattr(sampler, "_avoid_premature_stop", False):
        return None
    return size(space) + repeats(points)


def _has(of: Distribution | Scalar, value: Any) -> bool:
    if of is None or isinstance(of, bool | int | float | str):
        return bool(value == of)
    return of.has(value) if isinstance(of, Choice) else is_number(value) and of.has(value)
