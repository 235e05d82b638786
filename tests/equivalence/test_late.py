"""State in late slots, gradients that wait on the device or are waited for: the plain bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import traps
import zoo
from watching import chain, plan_of, rates, settled, space_of

import shoal
from shoal.core.errors import PlanError, SpecError
from shoal.core.technique import waiting_gradients
from shoal.memory.layout import head_sizes as layout_sizes
from shoal.memory.layout import largest_first
from shoal.planning import Planner

FULL_STATE = pytest.param("state", None, "fp32", marks=pytest.mark.full)
FULL_1_1, FULL_2_0 = (pytest.param(*n, marks=pytest.mark.full) for n in ((1, 1), (2, 0)))


@pytest.fixture
def train(watch):
    """Train; the text of every action of the first step."""

    def run(*asked, **options):
        return watch(*asked, exact=True, **options).first_step

    return run


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(("lookahead", "lookbehind"), [(0, 0), FULL_1_1, FULL_2_0])
@pytest.mark.parametrize(
    ("model", "precision"), [*((model, "fp32") for model in zoo.MODELS), ("gpt", "bf16")]
)
def test_of_every_model_with_a_neighbour_under_poison(
    model, precision, lookahead, lookbehind, train
):
    technique = shoal.Spilled(
        shards=5,
        optimizer="device",
        keep=(1,),
        keep_weights=(2,),
        keep_gradients=2,
        lookahead=lookahead,
        lookbehind=lookbehind,
    )
    recipe = zoo.recipe(clip=0.5, precision=precision)
    actions = train(recipe, space_of(model), technique, poison=True)
    late = [action for action in actions if action.endswith("late")]
    assert late == [
        "LOAD s0 state late",
        "LOAD s2 state late",
        "LOAD s3 state+grad late",
        "LOAD s4 state+grad late",
    ]
    stored = [action for action in actions if action.startswith("STORE") and "grad" in action]
    assert sorted(stored) == ["STORE s3 grad", "STORE s4 grad"]


@pytest.mark.parametrize("lookahead", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "model", ["gpt", *(pytest.param(m, marks=pytest.mark.full) for m in zoo.MODELS if m != "gpt")]
)
def test_state_that_comes_at_the_end_of_a_step_that_waits_for_no_norm(model, lookahead, train):
    technique = shoal.Spilled(
        shards=5,
        keep=(3,),
        keep_weights=(0, 1, 2),
        late_state=True,
        lookahead=lookahead,
    )
    actions = train(zoo.recipe(), space_of(model), technique, poison=True)
    late = [action for action in actions if action.endswith("late")]
    assert late == [f"LOAD s{shard} state late" for shard in (2, 1, 0)]
    behind = next(i for i, action in enumerate(actions) if action.startswith("B s3 m0"))
    assert behind < actions.index("LOAD s2 state late")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("lookahead", [0, 1])
def test_late_state_of_which_several_shards_share_what_travels(lookahead, train, layout_of_shards):
    layout = layout_of_shards(zoo.recipe(), space_of("gpt"))
    sizes = {s: layout_sizes(largest_first(layout[s].state)) for s in (1, 2)}
    technique = shoal.Spilled(
        shards=5,
        keep=(3,),
        keep_weights=(0, 1, 2),
        keep_head=tuple((shard, found[len(found) // 2]) for shard, found in sizes.items()),
        late_state=True,
        lookahead=lookahead,
    )
    actions = train(zoo.recipe(), space_of("gpt"), technique, poison=True)
    late = [action for action in actions if action.endswith("late")]
    assert late == [f"LOAD s{shard} state late" for shard in (2, 1, 0)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("order", "precision"), [("micro", "fp32"), ("shard", "fp32"), ("shard", "bf16")]
)
@pytest.mark.parametrize("source", ["known", "unknown"])
@pytest.mark.parametrize("gradients", [0, 3])
def test_state_that_comes_at_the_end_of_several_micro_batches(
    gradients, source, order, precision, train
):
    technique = shoal.Spilled(
        shards=4,
        keep=(3,),
        keep_weights=(0, 1),
        keep_gradients=gradients,
        late_state=True,
        lookahead=1,
        order=order if source == "known" else None,
    )
    options = {} if source == "known" else {"data": stream}
    recipe = chain(accumulate=3, precision=precision, **options)
    train(recipe, rates(), technique, poison=True)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_late_state_beside_a_shard_that_travels_whole(lookahead, train):
    technique = shoal.Spilled(
        shards=4,
        keep=(3,),
        keep_weights=(0, 2),
        keep_gradients=0,
        late_state=True,
        lookahead=lookahead,
    )
    train(chain(accumulate=3), rates(), technique, poison=True)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("order", ["micro", "shard"])
@pytest.mark.parametrize("gradients", [0, 2, 4])
def test_with_several_micro_batches_in_either_order(gradients, order, clip, train):
    technique = shoal.Spilled(
        shards=4,
        keep=(),
        keep_weights=(0, 2),
        keep_gradients=gradients,
        lookahead=0,
        lookbehind=0,
        order=order,
    )
    train(chain(accumulate=3, clip_grad_norm=clip), rates(), technique, poison=True)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_of_a_source_that_does_not_say_how_long_it_is(accumulate, clip, train):
    technique = shoal.Spilled(
        shards=4, optimizer="device", keep=(3,), keep_gradients=2, lookahead=1, lookbehind=0
    )
    recipe = chain(data=stream, accumulate=accumulate, clip_grad_norm=clip)
    train(recipe, rates(), technique, poison=True)


def test_tied_weights_whose_lender_leaves_its_gradients_on_the_device(train):
    technique = shoal.Spilled(
        shards=5, optimizer="device", keep=(2,), keep_weights=(0,), keep_gradients=4
    )
    recipe = zoo.recipe(clip=0.5, accumulate=2, schedule=True)
    train(recipe, space_of("gpt"), technique, poison=True)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", ["device", "host"])
def test_gradients_and_inputs_that_are_waited_for(place, precision, train):
    technique = shoal.Spilled(
        shards=6,
        optimizer=place,
        keep=(2,),
        lookahead=0,
        lookbehind=0,
        boundaries="host",
        recompute=True,
    )
    recipe = chain(clip_grad_norm=0.5, precision=precision)
    actions = train(recipe, rates(), technique, poison=True)
    assert "STORE s2 m0 boundary" in actions


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("of", "clip", "precision"),
    [("parameters", 0.5, "fp32"), ("state", 0.5, "fp32"), ("state", 0.5, "bf16"), FULL_STATE],
)
@pytest.mark.parametrize(
    "model", ["gpt", *(pytest.param(m, marks=pytest.mark.full) for m in zoo.MODELS if m != "gpt")]
)
def test_some_tensors_of_a_shard_may_stay(model, of, clip, precision, train, head_sizes):
    recipe, space = zoo.recipe(clip=clip, precision=precision), space_of(model)
    shard, sizes = max(head_sizes(recipe, space, of).items(), key=lambda item: len(item[1]))
    technique = shoal.Spilled(
        shards=5,
        optimizer="device",
        keep=(1,),
        keep_weights=(shard,) if of == "state" else (),
        keep_head=(shard, sizes[len(sizes) // 2]),
        lookahead=0,
    )
    train(recipe, space, technique, poison=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("accumulate", "clip"), [(1, 0.5), (3, 0.5), (3, None)])
@pytest.mark.parametrize("shard", [0, 1, 2, 3])
def test_with_a_head_the_rest_may_stay_in_its_slot_for_what_comes_next(
    shard, accumulate, clip, train
):
    technique = shoal.Spilled(
        shards=4,
        optimizer="device",
        keep=(),
        keep_weights=() if shard % 2 else (shard + 1,),
        keep_head=(shard, 1024),
        lookahead=2,
    )
    recipe = chain(accumulate=accumulate, clip_grad_norm=clip)
    train(recipe, rates(), technique, poison=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("of", ["parameters", "state"])
def test_they_go_where_their_trial_goes_with_nothing_else_that_stays(of, train, head_sizes):
    recipe = chain(optimizer=traps.momentum, accumulate=2)
    technique = shoal.Spilled(
        shards=3,
        optimizer="device",
        keep=(),
        keep_weights=(1,) if of == "state" else (),
        keep_head=(1, head_sizes(recipe, rates(), of, shards=3)[1][0]),
    )
    train(recipe, rates(3), technique, checkpoint_every=0, devices=2, poison=True)


@pytest.fixture
def layout_of_shards(tmp_path, monkeypatch):
    """The layouts of a trial's shards."""

    def found(recipe, space, shards=5):
        made = []
        plan = Planner.plan

        def planned(planner, trials, **options):
            made.append(plan(planner, trials, **options))
            return made[-1]

        with monkeypatch.context() as patch:
            patch.setattr(Planner, "plan", planned)
            plan_of(recipe, space, tmp_path, shoal.Spilled(shards=shards), "64MiB")
        return next(iter(made[0].layouts.values())).shards

    return found


@pytest.fixture
def head_sizes(layout_of_shards):
    """Shard -> bytes of its first tensors, of one, two, and so on; of those in the middle."""

    def found(recipe, space, of, shards=5):
        layout = layout_of_shards(recipe, space, shards)
        middle = {s: layout[s] for s in range(shards // 2, shards - 1)}
        wanted = {s: m.state if of == "state" else m.param for s, m in middle.items()}
        return {shard: layout_sizes(segment) for shard, segment in wanted.items()}

    return found


def test_trials_that_move_between_devices_and_an_optimizer_that_makes_its_state_late(train):
    technique = shoal.Spilled(shards=3, optimizer="device", keep=(), keep_gradients=3)
    recipe = chain(optimizer=traps.momentum, clip_grad_norm=0.5)
    train(recipe, rates(3), technique, checkpoint_every=0, devices=2, poison=True)


def test_room_that_is_empty_until_the_norm_is_used_and_said(tmp_path, run_study, assert_alone):
    recipe, space = zoo.recipe(clip=0.5), {"model": "gpt", "optimizer": "adamw", "lr": 1e-2}
    whole = plan_of(recipe, space, tmp_path, "resident", "64MiB").jobs[0].peak_bytes
    memory = int(0.6 * whole)
    plan = plan_of(recipe, space, tmp_path, settled("device"), memory)
    job = plan.jobs[0]
    assert waiting_gradients(job.technique, len(job.shards))
    assert "wait there for the step: " in plan.explain()
    assert "wait for the step on the device, for which there is room" in plan.explain()
    report = run_study(recipe, space, steps=2, technique=job.technique, memory=memory)
    assert_alone(report, report.trials, recipe, steps=2)


def test_tensors_that_cannot_stay_are_refused(tmp_path):
    recipe, space = zoo.recipe(), {"model": "gpt", "optimizer": "adamw", "lr": 1e-2}
    for shard, why in ((0, "tied parameters"), (2, "its first tensors have")):
        technique = shoal.Spilled(shards=5, optimizer="device", keep=(), keep_head=(shard, 3))
        with pytest.raises(PlanError, match=f"asked to keep 3 bytes of shard {shard}.*{why}"):
            plan_of(recipe, space, tmp_path, technique, "64MiB")


def test_what_cannot_be_is_refused():
    with pytest.raises(SpecError, match=r"keep_head=\(1, 512\) without the step on the device"):
        shoal.Spilled(shards=3, optimizer="host", keep_head=(1, 512))
    with pytest.raises(SpecError, match=r"names a shard that is not in keep=\(1,\)"):
        shoal.Spilled(shards=3, optimizer="device", keep=(1,), keep_head=(1, 512))
    with pytest.raises(SpecError, match="keep_gradients=2 with the step on the host"):
        shoal.Spilled(optimizer="host", keep_gradients=2)
    with pytest.raises(SpecError, match="late_state=True with the step on the host"):
        shoal.Spilled(optimizer="host", late_state=True)
    with pytest.raises(SpecError, match="late_state is True or False, got 1"):
        shoal.Spilled(late_state=1)
    with pytest.raises(SpecError, match="keep_gradients is a number of shards"):
        shoal.Spilled(keep_gradients=-1)
    for value in (2, True, 0.0):
        with pytest.raises(SpecError, match="lookbehind is 0 or 1"):
            shoal.Spilled(lookbehind=value)
    for value in ((1,), (1, 2, 3), 5, (), (1, "x"), (2, 1024.0), (True, 512), ((1, 2), 3)):
        with pytest.raises(SpecError, match="keep_head is a shard and a number of bytes"):
            shoal.Spilled(shards=3, optimizer="device", keep_head=value)
    for value in ((1, 0), ((0, 512), (0, 1024)), ((0, 512), (3, 512))):
        with pytest.raises(SpecError, match="at least one byte of it, each shard once"):
            shoal.Spilled(shards=3, optimizer="device", keep_head=value)


def test_a_head_that_is_asked_for_needs_no_other_shard_that_stays(train, head_sizes):
    sizes = head_sizes(chain(), rates(1), "param", shards=3)
    technique = shoal.Spilled(shards=3, optimizer="device", keep_head=(1, sizes[1][0]))
    assert technique.keep == ()
    train(chain(), rates(), technique)


class Forgetful(torch.optim.AdamW):
    """Keeps one more tensor after every second step: then it drops it, or sets it to None."""

    how = "pop"

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self._keep(self.state[parameter], parameter)
        return result

    def _keep(self, state: dict[str, Any], parameter: Any) -> None:
        if not state:
            return
        if int(state["step"]) % 2:
            state["extra"] = torch.zeros_like(parameter)
        elif self.how == "pop":
            state.pop("extra", None)
        else:
            state["extra"] = None


class Unset(Forgetful):
    """Sets it to None."""

    how = "none"


@pytest.mark.parametrize("kind", [Forgetful, Unset])
def test_an_optimizer_that_drops_a_part_of_its_state(kind, train):
    def optimizer(named: Any, hp: Any) -> Any:
        return kind([parameter for _, parameter in named], lr=hp["lr"])

    recipe = chain(optimizer=optimizer, clip_grad_norm=0.5)
    technique = shoal.Spilled(shards=4, optimizer="device", keep=())
    train(recipe, rates(), technique, poison=True)


class Stream:
    """Batches without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        yield from self._batches


def stream(hp: Any) -> tuple[Any, None]:
    return Stream(list(traps.data(hp)[0])), None
