"""Rules that choose among the trials of a device."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import SpecError
from shoal.core.plan import Plan
from shoal.core.seams import Candidate
from shoal.core.turns import (
    DEFAULT,
    RULES,
    LongestLeftFirst,
    MostStepsLeftFirst,
    ShortestStepFirst,
    rule_of,
)
from shoal.core.units import Seconds


def of(trial, ticket, left_s, step_s=1.0):
    return Candidate(trial=trial, ticket=ticket, remaining_s=left_s, warm=False, step_s=step_s)


_SECONDS = st.floats(0, 1e6)
_STEP_S = st.just(0.0) | st.floats(1e-6, 1e3)  # jobs have no shorter ones


@st.composite
def ready(draw):
    """Trials of one device, one candidate each."""
    trials = draw(st.lists(st.integers(0, 20), min_size=1, max_size=8, unique=True))
    return [
        Candidate(
            trial=trial,
            ticket=draw(st.integers(0, 5)),
            remaining_s=draw(_SECONDS),
            warm=draw(st.booleans()),
            step_s=draw(_STEP_S),
        )
        for trial in trials
    ]


@pytest.mark.parametrize("name", RULES)
@given(ready())
def test_a_rule_picks_one_of_the_candidates_in_whatever_order_they_come(name, candidates):
    chosen = rule_of(name).choose(candidates)
    assert chosen in candidates
    assert rule_of(name).choose(candidates[::-1]) == chosen


def test_a_rule_that_nobody_knows_is_refused_with_those_that_are_known():
    with pytest.raises(SpecError, match=f"'youngest first', which is no rule.*'{DEFAULT}'"):
        rule_of("youngest first")


def test_the_trial_with_the_most_left_goes_first():
    candidates = [of(0, ticket=1, left_s=5.0), of(1, ticket=2, left_s=9.0)]
    assert LongestLeftFirst().choose(candidates).trial == 1


def test_of_trials_with_as_many_whole_steps_left_the_oldest_step_goes_first():
    candidates = [of(0, ticket=2, left_s=9.4), of(1, ticket=1, left_s=8.6)]
    assert LongestLeftFirst().choose(candidates).trial == 1


def test_what_is_left_is_counted_in_steps_of_the_longest():
    candidates = [
        of(0, ticket=1, left_s=20.0, step_s=10.0),
        of(1, ticket=2, left_s=23.0, step_s=0.1),
    ]
    assert LongestLeftFirst().choose(candidates).trial == 0


def test_trials_of_unknown_length_take_turns_by_age():
    candidates = [of(0, 2, 0.0, 0.0), of(1, 1, 0.0, 0.0)]
    assert LongestLeftFirst().choose(candidates).trial == 1


def test_steps_are_counted_however_long_they_are():
    candidates = [of(0, 1, left_s=90.0, step_s=10.0), of(1, 2, left_s=20.0, step_s=2.0)]
    assert LongestLeftFirst().choose(candidates).trial == 0
    assert MostStepsLeftFirst().choose(candidates).trial == 1
    alike = [of(0, 2, left_s=90.0, step_s=10.0), of(1, 1, left_s=18.0, step_s=2.0)]
    assert MostStepsLeftFirst().choose(alike).trial == 1


def test_the_shortest_step_goes_first_whatever_is_left():
    candidates = [of(0, 1, left_s=90.0, step_s=10.0), of(1, 2, left_s=4.0, step_s=2.0)]
    assert ShortestStepFirst().choose(candidates).trial == 1
    alike = [of(0, 2, left_s=90.0), of(1, 1, left_s=1.0)]
    assert ShortestStepFirst().choose(alike).trial == 1


def plan_by(rule):
    return Plan(study="s", devices=(), jobs=(), active=3, seconds=Seconds(9.0), rule=rule)


@pytest.mark.parametrize("rule", RULES)
def test_a_plan_names_its_rule(rule):
    plan = plan_by(rule)
    assert Plan.from_json(plan.to_json()) == plan
    said = "" if rule == DEFAULT else f", {rule}"
    assert f"up to 3 at a time on each{said}; predicted" in plan.explain()


def test_a_plan_that_was_written_without_a_rule_has_the_usual_one():
    record = json.loads(plan_by("shortest step first").to_json())
    del record["rule"]
    assert Plan.from_json(json.dumps(record)) == plan_by(DEFAULT)
