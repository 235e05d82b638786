"""Whether trials whose settings change on the way keep their shape: all combinations are asked."""

from __future__ import annotations

import pytest

import shoal
from shoal.core.errors import PlanError
from shoal.core.spec import TrialSpec
from shoal.fusion.matching.match import Signature
from shoal.planning.changing import MOST, changes_of, why_apart
from shoal.runtime.wire.messages import Described

TRIAL = TrialSpec(number=7, hp={"lr": 0.1, "depth": 2, "act": "relu"}, seed=3)
SPACE = {"lr": shoal.uniform(0.0, 1.0), "depth": shoal.integer(1, 2)}
SPACE["act"] = shoal.choice("relu", "tanh")


def facts(hp) -> Signature:
    return Signature((("the model", hp["act"]),))


class Asked:
    """Describes as a worker would; ``reads`` are the settings that are part of the shape."""

    def __init__(self, *reads: str) -> None:
        self.reads, self.seen = reads, []

    def answer(self, order):
        (trial,) = order.trials
        assert order.arrays
        self.seen.append((trial.hp["depth"], trial.hp["act"]))
        if "worker" in self.reads:
            return "a worker ended meanwhile: killed"
        if "fails" in self.reads and trial.hp["depth"] == 1:
            return Described({}, {trial.number: "Traceback\nValueError: too thin"}, None, {}, {})
        seen = Signature(tuple((name, str(trial.hp[name])) for name in self.reads))
        return Described({trial.number: "s"}, {}, None, {trial.number: seen}, {})

    def why(self, *, wished: str | None = None) -> str:
        mine = Signature(tuple((n, str(TRIAL.hp[n])) for n in self.reads if n in TRIAL.hp))
        return why_apart(changes_of(SPACE), TRIAL, mine, self, wished=wished)


def test_every_other_combination_is_looked_at():
    asked = Asked()
    assert asked.why() == ""
    assert asked.seen == [(1, "relu"), (1, "tanh"), (2, "tanh")]


def test_floats_are_never_asked_about():
    space = {"lr": shoal.uniform(0.0, 1.0), "drop": shoal.choice(0.1, 0.2)}
    changes = changes_of(space)
    assert changes.count == 1
    asked = Asked("act")
    assert why_apart(changes, TRIAL, facts(TRIAL.hp), asked, wished="4") == ""
    assert asked.seen == []


@pytest.mark.parametrize(
    ("reads", "words"),
    [
        ("depth", "depth=1, act='relu', and be of another shape: depth: 2 in one, 1 in the other"),
        ("fails", "depth=1, act='relu', with which it cannot be built: ValueError: too thin"),
        ("worker", "cannot be described: a worker ended meanwhile: killed"),
    ],
)
def test_what_keeps_them_apart_is_told(reads, words):
    assert words in Asked(reads).why()
    with pytest.raises(PlanError, match="fuse=4 with population-based training") as told:
        Asked(reads).why(wished="4")
    assert words in str(told.value)


def test_a_flag_and_a_number_that_are_equal_are_two_values():
    asked, space = Asked(), {"depth": shoal.choice(1, True)}
    trial = TrialSpec(number=7, hp={"depth": 1, "act": "relu"}, seed=3)
    assert why_apart(changes_of(space), trial, Signature(()), asked, wished=None) == ""
    assert asked.seen == [(True, "relu")]


def test_too_many_are_not_looked_at():
    asked, space = Asked(), {"depth": shoal.integer(1, MOST + 1)}
    why = why_apart(changes_of(space), TRIAL, facts(TRIAL.hp), asked, wished=None)
    assert f"depth may come to be any of {MOST + 1} combinations" in why
    assert asked.seen == []
