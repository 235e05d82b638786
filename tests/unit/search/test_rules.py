"""Who goes on after a rung."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.search.facts import Facts
from shoal.search.rules import (
    Halving,
    Median,
    bracket_weights,
    likely_part,
    num_brackets,
)


def trials(*curves):
    found = []
    for curve in curves:
        found.append(Facts({}))
        for step, value in enumerate(curve, start=1):
            found[-1].report(step, value)
    return found


def test_the_best_third_goes_on():
    there = trials([0.9], [0.5], [0.7])
    assert Halving("min").prune(1, there, {0, 1, 2}, 0) == {0, 2}
    assert Halving("max").prune(1, there, {0, 1, 2}, 0) == {1, 2}


def test_a_later_generation_is_compared_with_those_before_it():
    there = trials([0.9], [0.5], [0.7], [0.4], [0.8], [0.6])
    assert Halving("min").prune(1, there, {3, 4, 5}, 0) == {4, 5}
    worse = trials([0.1], [0.2], [0.3], [0.4], [0.5], [0.6])
    assert Halving("min").prune(1, worse, {3, 4, 5}, 0) == {3, 4, 5}


def test_of_equal_trials_the_first_goes_on():
    assert Halving("min").prune(1, trials([1.0], [1.0], [1.0]), {0, 1, 2}, 0) == {1, 2}


def test_of_two_trials_one_goes_on_and_a_lone_one_does():
    assert Halving("min").prune(1, trials([2.0], [1.0]), {0, 1}, 0) == {0}
    assert Halving("min").prune(1, trials([2.0]), {0}, 0) == set()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", [Halving("min"), Halving("max"), Median("min")])
def test_a_value_that_is_not_finite_never_goes_on(rule, value):
    assert rule.prune(1, trials([value]), {0}, 0) == {0}


def test_rungs_are_three_times_as_far_each():
    assert [r for r in range(1, 30) if Halving("min").is_rung(0, r)] == [1, 3, 9, 27]


def test_who_is_below_the_median_at_a_rung_ends():
    there = trials([1.0], [2.0], [3.0], [4.0], [5.0])
    assert Median("min").prune(1, there, set(range(5)), 0) == {3, 4}
    assert Median("max").prune(1, there, set(range(5)), 0) == {0, 1}
    assert Median("min").prune(1, there[:4], set(range(4)), 0) == set()  # too few to say


def test_the_median_is_held_against_the_best_so_far():
    there = trials([9, 1], [9, 2], [9, 3], [9, 4], [0, 9])
    assert Median("min").prune(2, there, set(range(5)), 0) == {3}


def test_brackets_are_in_hyperbands_proportions():
    assert [num_brackets(n) for n in (1, 2, 3, 8, 9, 27)] == [1, 1, 2, 2, 3, 4]
    assert bracket_weights(3) == (9, 5, 3)
    rule = Halving("min", brackets=3)
    dealt = [rule.cohort(trial) for trial in range(17)]
    assert [dealt.count(bracket) for bracket in range(3)] == [9, 5, 3]
    assert set(dealt[:4]) == {0, 1, 2}  # dealt out evenly, not one after the other
    assert [rule.cohort(trial + 17) for trial in range(17)] == dealt


def test_a_bracket_is_compared_later_and_among_itself():
    rule = Halving("min", brackets=2)
    first = next(t for t in range(9) if rule.cohort(t) == 0)
    second = next(t for t in range(9) if rule.cohort(t) == 1)
    assert rule.is_rung(first, 1)
    assert not rule.is_rung(second, 1)
    assert rule.is_rung(second, 3)
    there = trials(*([float(t)] * 3 for t in range(9)))
    kept = set(range(9)) - rule.prune(3, there, set(range(9)), 0)
    assert {rule.cohort(t) for t in kept} == {0, 1}


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=30), st.sampled_from(["min", "max"]))
def test_whoever_goes_on_is_no_worse_than_who_ends(values, mode):
    there = trials(*([v] for v in values))
    for rule in (Halving(mode), Median(mode)):
        ended = rule.prune(1, there, set(range(len(values))), 0)
        on = [values[t] for t in range(len(values)) if t not in ended]
        assert on
        for value in (values[t] for t in ended):
            assert value >= max(on) if mode == "min" else value <= min(on)


@pytest.mark.parametrize("brackets", [1, 2, 3])
def test_a_trial_makes_the_likely_part_of_its_evaluations_on_average(brackets):
    rule, last, dealt = Halving("min", brackets), 27, sum(bracket_weights(brackets))
    values = list(range(81 * dealt))
    random.Random(0).shuffle(values)
    facts = trials(*([value] * last for value in values))
    going, made = set(range(len(values))), 0
    for evaluation in range(1, last + 1):
        made += len(going)
        there = {t for t in going if rule.is_rung(t, evaluation) and evaluation < last}
        going -= rule.prune(evaluation, _reached(facts, going, evaluation), there, 0)
    assert likely_part(last, brackets) == pytest.approx(made / len(values) / last, rel=1e-3)


def test_a_trial_that_is_evaluated_once_is_not_compared():
    assert likely_part(1, 1) == 1.0


def _reached(facts, going, evaluation):
    """Of those that ended before, what was known there."""
    return [facts[t] if t in going else Facts({}) for t in range(len(facts))]
