"""A pruner object of Optuna's, asked about trials."""

from __future__ import annotations

import pytest

from shoal.core.errors import SpecError
from shoal.search import choice
from shoal.search.judge import Judge
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
