"""Copies of a pipeline end on the bits of one process that adds up as they do."""

from __future__ import annotations

import pytest
import traps
import unlucky
import zoo
from pipelining import LR, animal, assert_alike, decay, sequence, trap

from shoal.core.errors import SpecError, TrialError
from shoal.pipeline.processes import StageProcesses
from shoal.pipeline.run import run_stages
from shoal.pipeline.wide import shares
from shoal.testing import plain_2bw_loop, plain_loop, plain_wide_loop, same_bits

FULL = pytest.mark.full
SCHEDULES = (*(pytest.param(s, marks=FULL) for s in ("naive", "gpipe")), "flush", "zb-h1", "2bw")
TWO = {"stages": 2, "width": 2}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("micro_batches", "recompute"),
    [(5, False), pytest.param(4, True, marks=FULL)],
)
def test_two_copies_of_two_stages_with_dropout_and_clipping(
    schedule, micro_batches, recompute, stage_processes
):
    recipe = trap(traps.Chain, micro_batches, clip_grad_norm=0.01, schedule=decay)
    trained = assert_alike(
        recipe, LR, stage_processes, schedule=schedule, recompute=recompute, steps=4, **TWO
    )
    assert trained.pipeline.draws
    assert trained.pipeline.foretold


@pytest.mark.parametrize("schedule", ["flush", "2bw"])
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("width", [pytest.param(2, marks=FULL), 3, pytest.param(4, marks=FULL)])
def test_copies_of_one_stage(width, clip, schedule, stage_processes):
    recipe = trap(traps.Chain, width + 1, clip_grad_norm=clip)
    assert_alike(recipe, LR, stage_processes, stages=1, width=width, schedule=schedule, steps=4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["flush", "zb-h1", "2bw"])
def test_three_copies_of_two_stages(schedule):
    recipe = trap(traps.Chain, 7, clip_grad_norm=0.01)
    with StageProcesses(6) as processes:
        assert_alike(recipe, LR, processes, stages=2, width=3, schedule=schedule, steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("predict", [False, pytest.param(True, marks=FULL)])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_tied_weights_with_two_versions(clip, predict, stage_processes):
    hp = {**LR, "model": "gpt", "optimizer": "adamw"}
    recipe = animal(5, clip_grad_norm=clip)
    trained = assert_alike(
        recipe, hp, stage_processes, schedule="2bw", predict=predict, steps=5, **TWO
    )
    assert trained.pipeline.ties == ((0, 1),)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [pytest.param("flush", marks=FULL), "zb-h1"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tied_weights_with_one(schedule, precision, stage_processes):
    hp = {**LR, "model": "gpt", "optimizer": "adamw"}
    recipe = animal(3, clip_grad_norm=0.01, precision=precision)
    assert_alike(recipe, hp, stage_processes, schedule=schedule, **TWO)


@pytest.mark.parametrize("model", [traps.LateGradient, traps.Unused, traps.SharedLayer])
@pytest.mark.parametrize("schedule", ["zb-h1", "2bw"])
def test_gradients_that_some_copies_or_all_lack(model, schedule, stage_processes):
    assert_alike(trap(model, 5), LR, stage_processes, schedule=schedule, steps=4, **TWO)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("recompute", [False, True])
def test_batch_statistics_are_those_of_copy_0_after_each_step(
    schedule, recompute, stage_processes
):
    hp = {**LR, "model": "resnet", "optimizer": "adamw"}
    assert_alike(animal(5), hp, stage_processes, schedule=schedule, recompute=recompute, **TWO)


def test_batch_statistics_and_2bw_are_refused(stage_processes):
    hp = {**LR, "model": "resnet", "optimizer": "adamw"}
    with pytest.raises(
        TrialError, match=r"changes the buffer .* Use schedule='flush', or width=1"
    ):
        assert_alike(animal(5), hp, stage_processes, schedule="2bw", **TWO)


def test_a_short_last_step_of_an_epoch(stage_processes):
    hp = {**LR, "model": "gpt", "optimizer": "sgd"}
    recipe = zoo.recipe(accumulate=3)  # five batches an epoch
    trained = assert_alike(recipe, hp, stage_processes, schedule="flush", steps=5, **TWO)
    assert trained.pipeline.groups == (3, 2, 3, 2, 3)
    assert shares(trained.pipeline.groups, 2) == ((2, 1, 2, 1, 2), (1, 1, 1, 1, 1))


@FULL
def test_a_loader_that_shuffles_draws_where_the_plain_loop_draws(stage_processes):
    hp = {**LR, "model": "bert", "optimizer": "adamw"}
    recipe = zoo.recipe(accumulate=5)
    assert_alike(recipe, hp, stage_processes, schedule="flush", **TWO)


def test_running_ahead_changes_no_bit(stage_processes):
    for lag in (0, 2):
        recipe = sequence(6, clip_grad_norm=0.01)
        assert_alike(recipe, LR, stage_processes, schedule="2bw", lag=lag, steps=5, **TWO)


# -- against the plain loop -------------------------------------------------------------------


def doubled(hp):
    """``plain_sequence`` in float64."""
    return sequence(1).model(hp).double()


def doubled_data(hp):
    train, _ = sequence(4).data(hp)
    return [(x.double(), y) for x, y in train], None


@pytest.mark.parametrize(
    "schedule", ["flush", *(pytest.param(s, marks=FULL) for s in ("gpipe", "zb-h1"))]
)
@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [({}, 1e-6), ({"model": doubled, "data": doubled_data}, 1e-12)],
    ids=["float32", "float64"],
)
def test_synchronous_copies_are_the_plain_loop_but_for_rounding(
    schedule, changes, tolerance, stage_processes
):
    recipe = sequence(4, clip_grad_norm=0.05, **changes)
    trained = assert_alike(recipe, LR, stage_processes, schedule=schedule, **TWO)
    plain = plain_loop(recipe, LR, 5, steps=3)
    assert trained.losses == pytest.approx(plain.losses, abs=tolerance)
    for name, parameter in plain.parameters.items():
        off = (trained.state["model"][name] - parameter.detach()).abs().max()
        assert off <= tolerance, f"{name} is off by {off}"


def test_masks_are_those_of_the_plain_loop(stage_processes):
    """With dropout too nothing differs but the order of sums."""
    recipe = trap(traps.Chain, 4)
    trained = assert_alike(recipe, LR, stage_processes, schedule="flush", steps=2, **TWO)
    plain = plain_loop(recipe, LR, 5, steps=2)
    assert trained.losses[0] == plain.losses[0]
    assert trained.losses == pytest.approx(plain.losses, abs=1e-6)


def test_the_rule_is_the_plain_loop_with_one_copy_and_another_sum_with_two(one_thread):
    recipe = sequence(4)
    plain, one = (
        plain_loop(recipe, LR, 5, steps=2),
        plain_wide_loop(recipe, LR, 5, steps=2, width=1),
    )
    two = plain_wide_loop(recipe, LR, 5, steps=2, width=2)
    stale = plain_2bw_loop(recipe, LR, 5, steps=2, copies=2)
    assert plain.losses == one.losses
    assert all(same_bits(p, one.parameters[name]) for name, p in plain.parameters.items())
    assert not all(same_bits(p, two.parameters[name]) for name, p in plain.parameters.items())
    assert stale.losses != two.losses
    with pytest.raises(SpecError, match="a training has one of them"):
        plain_loop(recipe, LR, 5, steps=1, copies=2, replicas=2)


# -- refusals ---------------------------------------------------------------------------------


def test_fewer_micro_batches_than_copies_are_refused():
    with pytest.raises(SpecError, match="got width=3 and a step of 2"):
        run_stages(sequence(2), LR, 5, steps=1, stages=1, width=3)


def test_more_devices_than_processes_are_refused(stage_processes):
    with pytest.raises(SpecError, match="6 stages were asked for, and there are processes for 4"):
        run_stages(sequence(4), LR, 5, steps=1, stages=3, width=2, processes=stage_processes)


def test_a_buffer_that_changes_on_a_later_batch_is_refused(stage_processes):
    with pytest.raises(TrialError, match=r"'0\.peak', which it did not on the first batch"):
        run_stages(unlucky.later(), LR, 5, steps=2, processes=stage_processes, hang_s=60, **TWO)


@pytest.mark.parametrize("copies", [0, -1, 2.5])
def test_no_loop_has_such_copies(copies):
    with pytest.raises(SpecError, match="1 copy or more"):
        plain_loop(unlucky.later(), LR, 5, steps=1, copies=copies)


def test_draws_that_nobody_can_foretell_are_refused(stage_processes):
    recipe = trap(traps.Stochastic, 4)
    with pytest.raises(SpecError, match="cannot be foretold: 2 copies would wait"):
        run_stages(
            recipe, LR, 5, steps=1, foretell=False, processes=stage_processes, hang_s=60, **TWO
        )


@FULL
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "2bw"])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_the_zoo(name, schedule, precision, stage_processes):
    if name == "resnet" and schedule == "2bw":
        pytest.skip("refused: its buffers change")
    hp = {**LR, "model": name, "optimizer": "adamw"}
    recipe = animal(5, clip_grad_norm=0.01, precision=precision)
    assert_alike(recipe, hp, stage_processes, schedule=schedule, steps=4, **TWO)
