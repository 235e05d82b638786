"""What few models, optimizers and sources do, and what must hold all the same."""

from __future__ import annotations

import oddities
import pytest

import shoal


def make_recipe(**changes):
    usual = {"model": oddities.chain, "data": oddities.data, "loss": oddities.loss}
    return shoal.Recipe(**{**usual, **changes})


@pytest.fixture
def check(run_study, assert_alone):
    def run(recipe, *, technique="resident", space=None, length=None, **options):
        length = length or {"steps": 5}
        space = {"lr": shoal.choice(0.05)} | (space or {})
        report = run_study(recipe, space, technique=technique, **length, **options)
        assert_alone(report, report.trials, recipe, **length)
        return report

    return run


BOTH = pytest.mark.parametrize("technique", ["resident", shoal.Spilled(shards=3)])


@BOTH
def test_a_buffer_that_two_modules_hold_stays_one(technique, check):
    report = check(make_recipe(model=oddities.sharing), technique=technique)
    model = report.trials[0].load()
    assert model[0].counter.equal(model[1].counter)


@BOTH
def test_state_that_an_optimizer_makes_in_its_second_step_is_not_there_before(technique, check):
    check(make_recipe(optimizer=oddities.late_key), technique=technique)


def test_an_optimizer_that_draws_random_numbers_trains_resident_only(check, run_study):
    recipe = make_recipe(optimizer=oddities.noisy)
    check(recipe)
    with pytest.raises(shoal.PlanError, match=r"draws random numbers.*technique='resident'"):
        run_study(recipe, {"lr": 0.05}, trials=1, steps=2, technique=shoal.Spilled(shards=3))


@BOTH
def test_a_short_group_at_the_end_of_unsized_data_ends_its_epoch(technique, check):
    recipe = make_recipe(data=oddities.unsized_data, accumulate=2)
    report = check(recipe, technique=technique, length={"epochs": 2})
    assert [row["epoch"] for row in report.trials[0].history] == [1, 2]


@BOTH
def test_gradients_that_the_optimizer_never_clears_are_no_ones_concern(technique, check):
    check(make_recipe(optimizer=oddities.some_layers), technique=technique)


def test_clipping_by_gradients_that_nobody_clears_is_refused(run_study):
    recipe = make_recipe(optimizer=oddities.some_layers, clip_grad_norm=0.05)
    words = r"does not hold 8 trainable parameters.*Freeze them"
    with pytest.raises(shoal.SpecError, match=words):
        run_study(recipe, {"lr": 0.05}, trials=1, steps=2)


def test_more_shards_than_pieces_are_refused_with_their_number(run_study):
    technique = shoal.Spilled(shards=99)
    with pytest.raises(shoal.PlanError, match=r"asked to train in 99 shards.*has 11 pieces"):
        run_study(make_recipe(), {"lr": 0.05}, trials=1, steps=2, technique=technique)


def test_a_worker_that_dies_in_the_last_evaluation_costs_that_evaluation(check, tmp_path):
    flag = tmp_path / "dead"
    check(
        make_recipe(data=oddities.deadly_validation),
        technique=shoal.Spilled(shards=3),
        space={"flag": shoal.choice(str(flag))},
        checkpoint_every=0,
    )
    assert flag.exists()


def test_a_validation_batch_larger_than_the_training_batches_is_planned_for(run_study):
    recipe = make_recipe(data=oddities.wide_validation)
    with pytest.raises(shoal.PlanError, match=r"does not fit a device of 64\.0 KiB"):
        run_study(recipe, {"lr": 0.05}, trials=1, steps=2, memory="64KiB")
