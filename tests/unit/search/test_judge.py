"""A pruner object of Optuna's, asked about trials."""

from __future__ import annotations

import random

import pytest

from shoal.core.errors import SpecError
from shoal.search import choice, uniform
from shoal.search.judge import Judge, check_decides
from shoal.search.search import Search

optuna = pytest.importorskip("optuna")


class Says(optuna.pruners.BasePruner):
    """Says the same of every trial, or raises it."""

    def __init__(self, answer):
        self.answer = answer

    def prune(self, study, trial):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (KeyError("memory"), "the pruner Says raised KeyError for trial 4 after 1 evaluation: "),
        ("no", "the pruner Says said 'no' of trial 4 after 1 evaluation. prune"),
    ],
)
def test_who_a_pruner_cannot_answer_for_is_called_by_its_number(answer, words):
    search = Search(2, Judge(Says(answer), "min", "s", {"a": choice(1, 2)}))
    for number in (4, 6):  # others are clones
        search.enroll(number, {"a": 1})
        search.report(number, 10, 0.5)
    with pytest.raises(SpecError, match=words):
        search.decide()


class Draws(optuna.pruners.BasePruner):
    """Ends every other trial, as chance has it."""

    def prune(self, study, trial):
        return self.draw(trial) < 0.5

    def draw(self, trial):
        return random.random()


class Seeded(Draws):
    def draw(self, trial):
        return random.Random(trial.number).random()


def test_a_pruner_that_raises_or_decides_otherwise_each_time_is_refused_before_any_trial_trains():
    space = {"a": choice(1, 2), "b": uniform(0.0, 1.0)}
    with pytest.raises(SpecError, match="Says raised KeyError for trial 0 after 1 evaluation"):
        check_decides(Says(KeyError("memory")), "min", "s", space)
    random.seed(0)
    with pytest.raises(SpecError, match="the pruner Draws decides otherwise each time"):
        check_decides(Draws(), "max", "s", space)
    for pruner in (Seeded(), Says(True), optuna.pruners.HyperbandPruner()):
        check_decides(pruner, "min", "s", space)
