"""Shards that keep what their forward saved, and do not recompute: the bits of the plain loop."""

from __future__ import annotations

import forms
import pytest
import torch
import traps
import zoo
from torch import nn
from watching import space_of

import shoal
from shoal.core.errors import PlanError, SpecError


@pytest.fixture
def train(watch):
    """Train; the text of every action."""

    def run(*asked, **options):
        return watch(*asked, **options).words

    return run


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", zoo.MODELS)
def test_shards_that_stay_and_the_one_before_the_turn_do_not_recompute(model, precision, train):
    recipe = zoo.recipe(clip=0.5, accumulate=2, precision=precision, schedule=True)
    technique = shoal.Spilled(
        shards=4, optimizer="device", keep=(0,), keep_weights=(1,), keep_activations=(0, 1, 2)
    )
    actions = train(recipe, space_of(model), technique, poison=True)
    forwards = {action for action in actions if action.startswith("F") and "saved" in action}
    assert {action.split()[1] for action in forwards} == {"s0", "s1", "s2"}
    assert "B s2 m0 saved" in actions


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_beside_shards_that_travel_and_inputs_that_wait(lookahead, place, train):
    recipe = zoo.recipe(clip=0.5)
    space = shoal.grid(model=["gpt"], optimizer=["sgd"], lr=[1e-2])
    technique = shoal.Spilled(
        shards=6,
        optimizer=place,
        lookahead=lookahead,
        keep=(1, 2),
        keep_activations=(1, 2),
        boundaries="host",
    )
    actions = train(recipe, space, technique, poison=True)
    assert "B s1 m0 saved" in actions
    assert "STORE s1 m0 boundary" not in actions


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
@pytest.mark.parametrize("model", sorted(forms.LAYERS))
def test_every_form_of_model(model, precision, train):
    """All shards stay; those that can, keep their activations."""
    recipe = forms.recipe(clip=0.5, accumulate=3, precision=precision, schedule=True)
    space = shoal.grid(model=[model], optimizer=["adamw"], lr=[1e-2])
    train(recipe, space, None, memory=forms_memory(model))


def forms_memory(model):
    return "1MiB"


def test_a_planned_trial_keeps_activations_where_there_is_room(train):
    recipe = shoal.Recipe(
        model=traps.Build(traps.Chain), data=traps.data, loss=traps.loss, optimizer=traps.adamw
    )
    actions = train(recipe, {"lr": 1e-2}, "spilled", memory="24KiB")
    assert any("saved" in action for action in actions)


def test_what_changes_shared_buffers_or_its_own_weights_recomputes(run_study):
    technique = shoal.Spilled(shards=3, keep=(0,), keep_activations=(0,))
    with pytest.raises(PlanError, match="its forward changes what its backward"):
        run_study(
            shoal.Recipe(model=traps.Build(traps.Renormed), data=traps.data, loss=traps.loss),
            {"lr": 1e-2},
            steps=1,
            technique=technique,
        )


def test_activations_of_shards_that_leave_cannot_stay(run_study):
    recipe = shoal.Recipe(model=traps.Build(traps.Chain), data=traps.data, loss=traps.loss)
    for saves, why in (((1,), "its parameters are not on the device"), ((4,), "one unit anyway")):
        technique = shoal.Spilled(shards=5, lookahead=1, keep_activations=saves)
        with pytest.raises(PlanError, match=why):
            run_study(recipe, {"lr": 1e-2}, steps=1, technique=technique)


def test_shard_by_shard_no_activations_can_stay(run_study):
    recipe = shoal.Recipe(
        model=traps.Build(traps.Chain), data=traps.data, loss=traps.loss, accumulate=2
    )
    technique = shoal.Spilled(shards=4, keep=(0,), keep_activations=(0,), order="shard")
    with pytest.raises(PlanError, match="leave out order='shard'"):
        run_study(recipe, {"lr": 1e-2}, steps=1, technique=technique)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_outputs_that_a_graph_holds_are_counted_where_they_wait_on_the_host(lookahead, train):
    recipe = shoal.Recipe(model=ends_in_tanh, data=traps.data, loss=traps.loss)
    technique = shoal.Spilled(
        shards=10,
        lookahead=lookahead,
        keep=(1, 3, 5),
        keep_activations=(1, 3, 5),
        boundaries="host",
    )
    train(recipe, {"lr": 1e-2}, technique, exact=True)


def ends_in_tanh(hp):
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(nn.Linear(12, 64), *blocks, nn.Linear(64, 3))


def test_what_a_forward_changes_is_kept_once_for_its_recompute(train):
    recipe = shoal.Recipe(model=remembers, data=traps.data, loss=traps.loss)
    for saves in ((), (1, 2)):
        technique = shoal.Spilled(shards=5, keep=(1, 2), keep_activations=saves)
        train(recipe, {"lr": 1e-2}, technique, exact=True)


class Remembers(nn.Module):
    """A block with a memory that each training forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("memory", torch.zeros(64, 64))

    def forward(self, x):
        if self.training:
            self.memory.add_(0.01)
        return torch.tanh(self.linear(x)) + self.memory.mean()


def remembers(hp):
    return nn.Sequential(nn.Linear(12, 16), *[Remembers() for _ in range(4)], nn.Linear(16, 3))


def test_recomputing_all_and_keeping_some_contradict_each_other():
    with pytest.raises(SpecError, match="Leave one of them out"):
        shoal.Spilled(shards=3, recompute=True, keep_activations=(0,))
    with pytest.raises(SpecError, match="True, False or 'auto', got 1"):
        shoal.Spilled(shards=3, recompute=1)
    with pytest.raises(SpecError, match="names shards: it is a list, as in"):
        shoal.Spilled(shards=3, keep_activations=3)
