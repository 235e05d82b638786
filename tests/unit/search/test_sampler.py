"""Sampling: which hyperparameters and seeds the trials of a study get."""

import pytest

from shoal.core.errors import SpecError
from shoal.search import choice, grid, integer, log_uniform, sample, trials_of

GOLDEN_POINTS = ["4.255069e-04 128", "2.646267e-04 64"]
RANDOM = {"lr": log_uniform(1e-5, 1e-2), "width": choice(64, 128), "depth": integer(1, 9), "k": 3}


def test_a_finite_space_is_its_product_with_the_first_name_slowest():
    points = sample({"a": choice(1, 2), "c": "x", "b": choice(10, 20, 30)}, None)

    assert [(p["a"], p["b"]) for p in points] == [
        (1, 10), (1, 20), (1, 30), (2, 10), (2, 20), (2, 30),
    ]  # fmt: skip
    assert all(list(point) == ["a", "c", "b"] for point in points)


def test_asking_for_all_of_a_grid_gives_its_own_order():
    space = grid(a=[1, 2], b=[3, 4])

    assert sample(space, 4, seed=7) == sample(space, None, seed=0)


def test_fewer_trials_than_points_are_a_seeded_subset_that_only_grows():
    space = grid(a=range(10), b=range(10))
    five, six = sample(space, 5, seed=1), sample(space, 6, seed=1)

    assert six[:5] == five
    assert len({tuple(point.values()) for point in six}) == 6
    assert sample(space, 5, seed=2) != five


def test_a_subset_of_a_grid_that_no_memory_could_hold_is_quick():
    space = grid(**{f"name{index}": range(100) for index in range(20)})

    assert len(sample(space, 3)) == 3


def test_a_trial_depends_on_its_number_and_the_seed_alone():
    assert sample(RANDOM, 3, seed=5) == sample(RANDOM, 20, seed=5)[:3]
    assert sample(RANDOM, 3, seed=6) != sample(RANDOM, 3, seed=5)


def test_a_name_more_leaves_the_other_names_values_alone():
    wider = sample({**RANDOM, "dropout": log_uniform(0.1, 0.5)}, 3)

    assert [{k: v for k, v in point.items() if k != "dropout"} for point in wider] == sample(
        RANDOM, 3
    )


def test_random_points_are_the_same_on_every_machine():
    points = sample({"lr": log_uniform(1e-5, 1e-2), "width": choice(64, 128)}, 2, seed=0)

    assert [f"{point['lr']:.6e} {point['width']}" for point in points] == GOLDEN_POINTS


def test_random_can_be_asked_for_on_a_finite_space():
    assert len(sample(grid(a=[1, 2]), 10, sampler="random")) == 10


def test_a_space_without_names_is_one_trial():
    assert sample({}, None) == [{}]


def test_a_trial_s_seed_is_the_study_s_plus_its_number():
    assert [trial.seed for trial in trials_of(RANDOM, 3, seed=10)] == [10, 11, 12]
    assert [trial.number for trial in trials_of(RANDOM, 3, seed=10)] == [0, 1, 2]


def test_a_seed_in_the_space_is_the_trial_s_seed():
    trials = trials_of(grid(lr=[0.1, 0.2], seed=[3, 4]), None, seed=10)

    assert [trial.seed for trial in trials] == [3, 4, 3, 4]


@pytest.mark.parametrize("seed", [0.5, "one", -1, True])
def test_a_seed_that_is_no_whole_number_is_refused(seed):
    with pytest.raises(SpecError, match="'seed' is a trial's seed, a whole number"):
        trials_of({"seed": seed}, None)


def test_more_trials_than_points_are_refused_with_both_numbers():
    with pytest.raises(SpecError, match=r"9 trials were asked for, but the space has only 4 poi"):
        sample(grid(a=[1, 2], b=[3, 4]), 9)


@pytest.mark.parametrize("trials", [0, -3, 1.5, True, "3"])
def test_a_number_of_trials_that_cannot_be_is_refused(trials):
    with pytest.raises(SpecError, match="trials is a whole number from 1"):
        sample(RANDOM, trials)


def test_a_random_study_needs_a_number_of_trials():
    with pytest.raises(SpecError, match="give trials=N"):
        sample(RANDOM, None)


def test_a_grid_over_a_continuous_name_is_refused_by_that_name():
    with pytest.raises(SpecError, match=r"needs a finite space, but 'lr' is Uniform"):
        sample(RANDOM, 3, sampler="grid")
