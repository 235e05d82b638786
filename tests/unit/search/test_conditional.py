"""Conditional spaces: names that come with some values of a choice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import SpecError
from shoal.search import choice, is_finite, sample, uniform
from shoal.search.space import check_space, size, walk

OPTIMIZERS = choice("sgd", "adam", when={"sgd": {"momentum": choice(0.0, 0.9), "nesterov": True}})
SPACE = {"lr": choice(0.1, 0.2), "optimizer": OPTIMIZERS, "depth": choice(1, 2)}


def test_a_trial_has_the_names_of_its_branch_and_no_others():
    points = sample({**SPACE, "lr": uniform(0, 1)}, 20)

    assert {tuple(p) for p in points} == {
        ("lr", "optimizer", "momentum", "nesterov", "depth"),
        ("lr", "optimizer", "depth"),
    }
    assert all(("momentum" in p) == (p["optimizer"] == "sgd") for p in points)


def test_a_grid_lists_each_branch_once_with_the_first_name_slowest():
    points = sample(SPACE, None)

    assert len(points) == size(check_space(SPACE)) == 2 * (2 + 1) * 2
    assert len({tuple(p.items()) for p in points}) == 12
    assert [p.get("momentum") for p in points[:6]] == [0.0, 0.0, 0.9, 0.9, None, None]
    assert [p["lr"] for p in points] == [0.1] * 6 + [0.2] * 6


def test_branches_may_have_branches():
    inner = choice("cosine", "step", when={"step": {"every": choice(10, 20)}})
    space = {"schedule": choice(None, "decay", when={"decay": {"kind": inner}})}

    assert sample(space, None) == [
        {"schedule": None},
        {"schedule": "decay", "kind": "cosine"},
        {"schedule": "decay", "kind": "step", "every": 10},
        {"schedule": "decay", "kind": "step", "every": 20},
    ]


def test_a_draw_of_a_name_does_not_depend_on_branches():
    plain = sample({"lr": uniform(0, 1)}, 5)

    assert [{"lr": p["lr"]} for p in sample({**SPACE, "lr": uniform(0, 1)}, 5)] == plain


def test_of_values_that_are_equal_but_of_other_types_one_has_the_branch():
    space = {"width": choice(1, True, 1.0, when={True: {"x": 1}})}

    assert sample(space, None) == [{"width": 1}, {"width": True, "x": 1}, {"width": 1.0}]


def test_what_a_branch_draws_makes_the_space_infinite():
    assert not is_finite({"a": choice(1, 2, when={1: {"b": uniform(0, 1)}})})
    with pytest.raises(SpecError, match=r"needs a finite space, but 'b' is Uniform"):
        sample({"a": choice(1, 2, when={1: {"b": uniform(0, 1)}})}, 2, sampler="grid")


def test_a_choice_says_its_branches_only_if_it_has_some():
    assert repr(choice(1, 2)) == "Choice(values=(1, 2))"  # as records of earlier studies have it
    assert "momentum" in repr(OPTIMIZERS)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (lambda: {"a": choice(1, 2, when={3: {"b": 1}})}, "3 is none of the values 1, 2"),
        (lambda: {"a": choice(1, when={1: {"a": 2}})}, "'a', which is in the space itself too"),
        (lambda: {"b": 3, "a": choice(1, when={1: {"b": 2}})}, "in the space itself too"),
        (
            lambda: {"a": choice(1, 2, when={1: {"b": 3}, 2: {"b": 4}})},
            "in another branch of 'a', and differs too",
        ),
        (
            lambda: {"a": choice(1, when={1: {"b": 3}}), "c": choice(1, when={1: {"b": 3}})},
            "in a branch of 'a' too",
        ),
        (lambda: {"a": choice(1, when={1: {"state": 3}})}, "'state' is reserved"),
        (lambda: {"a": choice(1, when={1: 7})}, "a space is a dict"),
    ],
)
def test_a_branch_that_cannot_be_meant_is_refused(space, words):
    with pytest.raises(SpecError, match=words):
        check_space(space())


def test_branches_of_one_choice_may_share_a_name_that_is_the_same():
    rate = uniform(0, 1)
    space = check_space({"a": choice(1, 2, 3, when={1: {"b": rate}, 2: {"b": rate}})})

    assert [list(p) for p in sample(space, 30, seed=1)].count(["a"]) > 0


@given(st.integers(1, 12), st.integers(0, 99))
def test_a_subset_of_a_conditional_grid_has_no_point_twice(trials, seed):
    points = sample(SPACE, trials, seed)

    assert len({tuple(p.items()) for p in points}) == trials


def test_a_walk_asks_for_a_choice_before_what_comes_with_it():
    asked = []

    def pick(name, distribution):
        asked.append(name)
        return distribution.values[0]

    walk(check_space(SPACE), pick)
    assert asked == ["lr", "optimizer", "momentum", "nesterov", "depth"]
