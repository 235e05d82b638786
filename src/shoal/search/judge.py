"""A pruner object of Optuna's as a rule: asked in the order of numbers, of one fixed view.

[Note: what a pruner is shown]
A pruner looks at a study's trials, and in a study that runs these are at whatever step the
machine brought them to. So each decision, of a generation g at a rung r, gets a study of its own
in memory, which is a function of values alone:

    generations before g-1    as they ended: that is waited for
    g-1 and g                 running, with their values up to rung r; or, before that, ended

The object is a copy of what the user gave, fresh each time. What it writes on trials (successive
halving notes their rungs) is carried from one view to the next.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.core.errors import SpecError
from shoal.core.units import counted
from shoal.search.facts import Facts
from shoal.search.library import copied, distributions_of, load_optuna, new_study
from shoal.search.space import Distribution, Point, walk

Notes = Mapping[str, Any]
_REHEARSED = (0.1, 0.5, 0.9)  # what is drawn of three trials, and what comes of it


class Judge:
    """Asks a pruner object.

    Args:
        name: The study's: Hyperband draws a trial's bracket from it.
    """

    needs_ends = True

    def __init__(
        self, pruner: Any, mode: str, name: str, space: Mapping[str, Distribution]
    ) -> None:
        self._pruner, self._mode, self._name, self._space = pruner, mode, name, space
        self.why = f"the pruner {type(pruner).__name__} ended it by"
        self._notes: dict[int, list[tuple[int, Notes]]] = {}  # by trial: after which rung, what

    def is_rung(self, trial: int, rung: int) -> bool:
        return True

    def cohort(self, trial: int) -> int:
        return 0

    def prune(
        self, rung: int, trials: Sequence[Facts], asked: Collection[int], first: int
    ) -> set[int]:
        """See ``Rule``.

        Raises:
            SpecError: the pruner raised.
        """
        optuna = load_optuna("a pruner of Optuna's")
        pruner = copied("pruner", self._pruner)
        study = new_study(optuna, self._mode, study_name=self._name, pruner=pruner)
        for trial, facts in enumerate(trials):
            own = trial in asked
            study.add_trial(self._frozen(optuna, trial, facts, rung, trial < first, own))
        pruned = set()
        for trial in sorted(asked):
            frozen = study.get_trials(deepcopy=False)[trial]
            try:
                ends = pruner.prune(study, frozen)
            except Exception as error:
                raise SpecError(
                    f"the pruner {type(pruner).__name__} raised {type(error).__name__} for "
                    f"{_where(trials[trial], rung)}: {error}. shoal's own are pruner='asha', "
                    "'hyperband' and 'median'."
                ) from error
            if not isinstance(ends, bool | np.bool_):
                raise SpecError(
                    f"the pruner {type(pruner).__name__} said {ends!r} of "
                    f"{_where(trials[trial], rung)}. prune(study, trial) returns True or False."
                )
            if ends:
                pruned.add(trial)
        after = study.get_trials(deepcopy=False)
        for trial in asked:
            self._notes.setdefault(trial, []).append((rung, after[trial].system_attrs))
        return pruned

    def _frozen(
        self, optuna: Any, trial: int, facts: Facts, rung: int, has_ended: bool, is_own: bool
    ) -> Any:
        """A trial as it is shown at ``rung``."""
        shown = facts.until(None if has_ended else rung)
        is_over = has_ended or facts.is_over_before(rung)
        state, value = self._ending(facts) if is_over else ("RUNNING", None)
        until = rung if has_ended or not is_own else rung - 1
        return optuna.trial.create_trial(
            state=optuna.trial.TrialState[state],
            value=value,
            params=facts.point,
            distributions=distributions_of(optuna, self._space, facts.point),
            intermediate_values=shown,
            system_attrs=dict(self._noted(trial, None if has_ended else until)),
        )

    def _ending(self, facts: Facts) -> tuple[str, float | None]:
        if facts.how == "finished" and facts.value is not None and facts.value == facts.value:
            return "COMPLETE", facts.value
        return ("FAIL" if facts.how in ("failed", "finished") else "PRUNED"), None

    def _noted(self, trial: int, until: int | None) -> Notes:
        """What it wrote on a trial, up to a rung."""
        known = [n for rung, n in self._notes.get(trial, ()) if until is None or rung <= until]
        return known[-1] if known else {}


def check_decides(pruner: Any, mode: str, name: str, space: Mapping[str, Distribution]) -> None:
    """Refuse a pruner that decides otherwise each time: its study could not be resumed.

    Raises:
        SpecError: two copies of it ended other ones of three trials, or it raised.
    """
    facts = [
        Facts(_point(space, at), values=[1.0 - at, 1.0 - at / 2], number=number)
        for number, at in enumerate(_REHEARSED)
    ]
    ended = []
    for _ in range(2):
        judge = Judge(pruner, mode, name, space)
        ended.append([judge.prune(rung, facts, range(len(facts)), 0) for rung in (1, 2)])
    if ended[0] != ended[1]:
        raise SpecError(
            f"the pruner {type(pruner).__name__} decides otherwise each time, so that no run "
            "could be repeated or resumed. Let it draw from random.Random(trial.number), or not "
            "at all."
        )


def _point(space: Mapping[str, Distribution], unit: float) -> Point:
    return walk(space, lambda _, of: of.pick(unit))


def _where(facts: Facts, rung: int) -> str:
    return f"trial {facts.number} after {counted(rung, 'evaluation')}"
