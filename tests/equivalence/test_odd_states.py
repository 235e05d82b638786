"""Optimizers that let go of their state, or keep it where torch's own have none."""

from __future__ import annotations

import keeping
import pytest
import squads
import staging

import shoal
from shoal.core.errors import PlanError, SpecError
from shoal.memory import chunks
from shoal.testing import assert_same, plain_loop

IN_SHARDS = {place: shoal.Spilled(shards=3, optimizer=place) for place in ("host", "device")}


def kinds(*chosen):
    return shoal.grid(kind=[kind.__name__ for kind in chosen], lr=[0.01])


def test_what_an_optimizer_lets_go_of_is_no_state_any_more(run_study, assert_alone):
    space = kinds(keeping.Clears, keeping.Deletes, keeping.Replaces, keeping.Drops)
    recipe = keeping.recipe()
    report = run_study(recipe, space, steps=6, technique="resident")
    assert_alone(report, report.trials, recipe, steps=6)


@pytest.mark.parametrize("place", IN_SHARDS)
def test_nor_is_it_where_shards_step_by_themselves(place, run_study, assert_alone):
    space = kinds(keeping.Deletes, keeping.Replaces, keeping.Drops)
    recipe = keeping.recipe()
    report = run_study(recipe, space, steps=6, technique=IN_SHARDS[place], poison=True)
    assert_alone(report, report.trials, recipe, steps=6)


def test_options_may_be_tensors_and_state_may_be_a_slice(run_study, assert_alone):
    recipe = keeping.recipe()
    report = run_study(recipe, kinds(keeping.Wide, keeping.Sliced), steps=3, technique="resident")
    assert_alone(report, report.trials, recipe, steps=3)


@pytest.mark.parametrize("kind", [keeping.Alone, keeping.Turns])
def test_state_of_no_parameter_or_in_lists_goes_on_with_its_trial(kind, interrupted):
    recipe = keeping.recipe()
    space = kinds(kind)
    report = interrupted(recipe, "resident", "resident", devices=1, space=space, epochs=3)
    trial = report.trials[0]
    assert_same(plain_loop(recipe, trial.hp, trial.seed, epochs=3), trial)


def test_so_it_does_beside_another_optimizer(interrupted):
    recipe = keeping.recipe(keeping.beside_another)
    report = interrupted(recipe, "resident", "resident", devices=1, epochs=3)
    trial = report.trials[0]
    assert_same(plain_loop(recipe, trial.hp, trial.seed, epochs=3), trial)


def test_such_a_state_is_its_slots_own_in_an_array(run_study):
    space = shoal.grid(kind=["Alone"], lr=[0.01, 0.003])
    report = run_study(keeping.recipe(), space, steps=3, fuse=2)
    squads.assert_arrayed(report, report.trials, keeping.recipe(), 2, steps=3)


def test_a_rate_that_is_a_tensor_stays_the_tensor_that_a_schedule_has(interrupted):
    recipe = keeping.recipe(keeping.tensor_rate, schedule=keeping.by_the_rate_of_now)
    report = interrupted(recipe, "resident", "resident", devices=1, epochs=3)
    trial = report.trials[0]
    assert_same(plain_loop(recipe, trial.hp, trial.seed, epochs=3), trial)


COUNTING = kinds(keeping.Weighs, keeping.WeighsTrained)


@pytest.mark.parametrize("place", IN_SHARDS)
def test_what_groups_count_is_counted_once_a_step(place, run_study, assert_alone, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_S", 0.0)  # on the host each tensor is stepped alone
    recipe = keeping.recipe(keeping.in_groups, clip_grad_norm=0.5)
    report = run_study(recipe, COUNTING, steps=6, technique=IN_SHARDS[place], poison=True)
    assert_alone(report, report.trials, recipe, steps=6)
    groups = report.trials[0].load_state()["optimizer"]["groups"]
    assert [group["k"] for group in groups] == [6, 6, 6]


@pytest.mark.parametrize(
    "technique",
    [
        shoal.Pipelined(stages=2),
        shoal.Pipelined(stages=2, schedule="2bw"),
        shoal.Pipelined(stages=2, shards=4, optimizer="host"),
    ],
    ids=["flush", "2bw", "spilled"],
)
def test_so_it_is_in_stages_of_which_one_alone_has_a_group(technique, run_staged):
    recipe = keeping.recipe(keeping.in_groups, data=staging.even, accumulate=2)
    run_staged(recipe, technique, COUNTING)


@pytest.mark.parametrize("sharded", [False, True])
def test_so_it_is_in_replicas(sharded, run_replicas):
    technique = shoal.DataParallel(width=2, shard=sharded)
    run_replicas(keeping.recipe(keeping.in_groups, splittable=True), technique, COUNTING)


@pytest.mark.parametrize(
    ("one", "then"),
    [
        (IN_SHARDS["host"], "resident"),
        (shoal.Pipelined(stages=2), IN_SHARDS["device"]),
        ("resident", shoal.Pipelined(stages=3)),
    ],
)
def test_a_count_goes_on_with_its_trial(one, then, interrupted):
    recipe, space = keeping.recipe(keeping.in_groups), kinds(keeping.Weighs)
    report = interrupted(recipe, one, then, space=space, epochs=3)
    trial = report.trials[0]
    assert_same(plain_loop(recipe, trial.hp, trial.seed, epochs=3), trial)


@pytest.mark.parametrize(
    ("optimizer", "space", "why"),
    [
        (keeping.make, kinds(keeping.Alone), "couples parameters across layers"),
        (keeping.clipping_hook, {"lr": 0.01}, "'clipping_hook.<locals>.clip', couples"),
    ],
)
def test_what_would_be_done_once_for_each_shard_is_no_part_of_one(
    optimizer, space, why, run_study
):
    with pytest.raises(PlanError, match=why):
        run_study(keeping.recipe(optimizer), space, steps=3, technique=IN_SHARDS["host"])


@pytest.mark.parametrize(
    ("kind", "does"), [(keeping.Keeps, "leaves gradients"), (keeping.Counts, "changes 'cleared'")]
)
def test_who_does_not_clear_gradients_in_zero_grad_is_told_so(kind, does, run_study):
    with pytest.raises(SpecError, match=f"zero_grad of the optimizer {kind.__name__} {does}, and"):
        run_study(keeping.recipe(), kinds(kind), steps=2)
