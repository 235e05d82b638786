"""Every synchronous schedule ends on the bits of one process that accumulates as much."""

from __future__ import annotations

import keeping
import pytest
import traps
import zoo
from pipelining import LR, animal, assert_alike, decay, plain_sequence, sequence, trap

SYNCHRONOUS = ("naive", "gpipe", "flush", "zb-h1")
KEEPING = pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])


@KEEPING
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("micro_batches", [4, 5, pytest.param(8, marks=pytest.mark.full)])
def test_four_stages_with_dropout_and_clipping(
    schedule, micro_batches, recompute, stage_processes
):
    recipe = trap(traps.Chain, micro_batches, clip_grad_norm=0.01, schedule=decay)
    assert_alike(recipe, LR, stage_processes, stages=4, schedule=schedule, recompute=recompute)


@pytest.mark.slow
@KEEPING
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("micro_batches", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_two_stages_that_tie_the_head_to_the_embedding(
    schedule, micro_batches, recompute, stage_processes
):
    hp = {**LR, "model": "gpt", "optimizer": "adamw"}
    recipe = animal(micro_batches, clip_grad_norm=0.01)
    trained = assert_alike(
        recipe, hp, stage_processes, stages=2, schedule=schedule, recompute=recompute
    )
    assert trained.pipeline.ties == ((0, 1),)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("cuts", [(1, 2, 3), (3, 4, 5), (2, 3, 5)])
def test_uneven_cuts_with_skips_over_several_stages(schedule, cuts, stage_processes):
    recipe = trap(traps.Skips, 4)
    assert_alike(recipe, LR, stage_processes, stages=4, schedule=schedule, cuts=cuts)


@pytest.mark.parametrize("model", [traps.SharedBoundary, traps.Structured, traps.InPlace])
@pytest.mark.parametrize("schedule", ["flush", "zb-h1"])
def test_boundaries_of_any_form_cross_processes(schedule, model, stage_processes):
    assert_alike(trap(model, 4), LR, stage_processes, stages=4, schedule=schedule)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["flush", "zb-h1"])
@pytest.mark.parametrize("model", [traps.SharedLayer, traps.SharedArgument, traps.Reused])
def test_a_weight_that_two_stages_read_is_stepped_once(
    model, schedule, precision, stage_processes
):
    recipe = trap(model, 4, precision=precision, clip_grad_norm=0.01)
    options = {"stages": 4, "schedule": schedule, "cuts": (2, 3, 5)}
    trained = assert_alike(recipe, LR, stage_processes, **options)
    assert trained.pipeline.ties


@pytest.mark.parametrize("model", [traps.Unused, traps.LateGradient, traps.Scaled])
def test_parameters_without_a_gradient_are_skipped(model, stage_processes):
    assert_alike(trap(model, 4), LR, stage_processes, stages=3, schedule="zb-h1", steps=4)


@KEEPING
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_batch_statistics_are_taken_once_in_the_order_of_the_data(
    schedule, recompute, stage_processes
):
    hp = {**LR, "model": "resnet", "optimizer": "adamw"}
    assert_alike(animal(4), hp, stage_processes, stages=4, schedule=schedule, recompute=recompute)


def test_a_short_last_group_of_an_epoch_is_stepped(stage_processes):
    hp = {**LR, "model": "gpt", "optimizer": "sgd"}
    recipe = zoo.recipe(accumulate=3)  # five batches an epoch
    trained = assert_alike(recipe, hp, stage_processes, stages=2, schedule="flush", steps=5)
    assert trained.pipeline.groups == (3, 2, 3, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["flush", "gpipe"])
def test_a_loader_that_shuffles_draws_where_the_plain_loop_draws(schedule, stage_processes):
    hp = {**LR, "model": "bert", "optimizer": "adamw"}
    assert_alike(zoo.recipe(accumulate=5), hp, stage_processes, stages=2, schedule=schedule)


def test_running_ahead_changes_no_bit(stage_processes):
    recipe = trap(traps.Glue, 8)
    for lag in (0, 1, 3):
        assert_alike(recipe, LR, stage_processes, stages=3, schedule="flush", lag=lag)


def test_a_model_that_draws_nothing_waits_for_no_random_state(stage_processes):
    trained = assert_alike(sequence(4), LR, stage_processes, stages=4, schedule="flush")
    assert not trained.pipeline.draws
    assert trained.most_in_flight == (4, 3, 2, 1)


@pytest.mark.parametrize("schedule", ["zb-h1", "2bw"])
def test_stages_whose_parameters_are_frozen(schedule, stage_processes):
    recipe = sequence(3, model=frozen_at_first, schedule=decay)
    assert_alike(recipe, LR, stage_processes, stages=3, cuts=(3, 5), schedule=schedule)


def frozen_at_first(hp):
    """Nothing to train in the first stage, nor in the second."""
    model = plain_sequence(hp)
    for layer in list(model)[:4]:
        layer.requires_grad_(False)
    return model


@pytest.mark.parametrize("schedule", ["flush", "zb-h1", "gpipe"])
def test_one_stage_is_the_plain_loop(schedule, stage_processes):
    recipe = trap(traps.Chain, 3, clip_grad_norm=0.01)
    assert_alike(recipe, LR, stage_processes, stages=1, schedule=schedule)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@KEEPING
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_the_zoo(name, stages, schedule, recompute, precision, stage_processes):
    hp = {**LR, "model": name, "optimizer": "adamw"}
    recipe = animal(stages + 1, clip_grad_norm=0.01, precision=precision)
    assert_alike(
        recipe, hp, stage_processes, stages=stages, schedule=schedule, recompute=recompute
    )


def test_what_groups_count_is_told_by_a_stage_that_steps_them(stage_processes):
    recipe = trap(traps.Chain, 4, optimizer=keeping.in_groups)
    trained = assert_alike(recipe, {**LR, "kind": "Weighs"}, stage_processes, stages=3)
    assert [group["k"] for group in trained.state["optimizer"]["groups"]] == [3, 3, 3]
