"""Parameters that stay from a forward to its backward, outside the slots: the plain bits."""

from __future__ import annotations

import pytest
import zoo
from watching import chain, plan_of, rates, settled, space_of

import shoal
from shoal.core.errors import SpecError
from shoal.core.technique import turned_shards


@pytest.fixture
def train(watch):
    """Train; the text of every action of the first step."""

    def run(*asked, **options):
        return watch(*asked, exact=True, **options).first_step

    return run


@pytest.mark.sample(1)
@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("model", zoo.MODELS)
def test_of_every_model_with_a_neighbour_under_poison(model, lookahead, train):
    technique = shoal.Spilled(
        shards=5, optimizer="host", keep=(1,), keep_turn=2, lookahead=lookahead
    )
    actions = train(zoo.recipe(clip=0.5), space_of(model), technique, poison=True)
    turned = [s for s in (0, 2, 3, 4)[: -1 - lookahead]][-2:]
    owns = [action for action in actions if action.endswith("own")]
    assert owns == [f"LOAD s{shard} param own" for shard in turned]
    loads = [action for action in actions if action.startswith("LOAD")]
    assert not [s for s in turned if f"LOAD s{s} param" in loads]  # no second one


@pytest.mark.sample(1)
@pytest.mark.parametrize("lookahead", [0, 1])
def test_where_all_that_travel_are_held_so_there_are_no_slots(lookahead, watch):
    technique = shoal.Spilled(
        shards=5, optimizer="host", keep=(1,), keep_turn=4, lookahead=lookahead
    )
    seen = watch(zoo.recipe(), space_of("gpt"), technique, poison=True, exact=True)
    owns = [action for action in seen.first_step if action.endswith("own")]
    assert sorted(owns) == [f"LOAD s{shard} param own" for shard in (0, 2, 3, 4)]
    every = {action for action in seen.words if action.startswith("LOAD")}  # evaluations too
    assert every == {"LOAD s1 param+state", *owns}


@pytest.mark.sample(1)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("order", ["micro", "shard"])
def test_with_several_micro_batches_in_either_order(order, clip, train):
    technique = shoal.Spilled(shards=4, keep=(), keep_turn=4, lookahead=0, order=order)
    train(chain(accumulate=3, clip_grad_norm=clip), rates(), technique, poison=True)


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_tied_weights_and_weights_that_travel_narrow(model, train):
    recipe = zoo.recipe(precision="bf16", clip=0.5, accumulate=2, schedule=True)
    technique = shoal.Spilled(shards=5, transfer="bf16", keep=(2,), keep_turn=3, lookahead=0)
    train(recipe, space_of(model), technique, poison=True)


def test_their_activations_may_stay_and_their_inputs_may_wait(train):
    technique = shoal.Spilled(
        shards=5, keep=(), keep_turn=2, keep_activations=(1, 2, 3), boundaries="host"
    )
    actions = train(zoo.recipe(clip=0.5), space_of("gpt"), technique, poison=True)
    assert "B s1 m0 saved" in actions
    assert "LOAD s1 param own" in actions


@pytest.mark.full
def test_room_at_the_turn_is_used_and_said(tmp_path, run_study, assert_alone):
    recipe, space = zoo.recipe(clip=0.5), {"model": "gpt", "optimizer": "adamw", "lr": 1e-2}
    whole = plan_of(recipe, space, tmp_path, "resident", "64MiB").jobs[0].peak_bytes
    technique = settled("host")
    plan = plan_of(recipe, space, tmp_path, technique, int(0.6 * whole))
    job = plan.jobs[0]
    assert turned_shards(job.technique, len(job.shards))
    assert "from forward to backward" in plan.explain()
    assert "from forward to backward, when there is room for them" in plan.explain()
    report = run_study(recipe, space, steps=2, technique=job.technique, memory=int(0.6 * whole))
    assert_alone(report, report.trials, recipe, steps=2)


def test_what_cannot_be_is_refused():
    with pytest.raises(SpecError, match="keep_turn=2 with the step on the device"):
        shoal.Spilled(optimizer="device", keep_turn=2)
    with pytest.raises(SpecError, match="keep_turn is a number of shards"):
        shoal.Spilled(keep_turn=-1)
