"""Inputs of shards that wait on the host between forward and backward: the same bits."""

from __future__ import annotations

import forms
import pytest
import traps
import zoo
from torch import nn
from watching import rates, space_of

import shoal


@pytest.fixture
def train(watch):
    """Train in shards whose inputs wait on the host; the actions that moved them, by trial."""

    def run(*asked, **options):
        return watch(*asked, **options).that_end_with("boundary")

    return run


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("place", ["device", "host"])
def test_two_trials_whose_inputs_wait_on_the_host_have_the_plain_bits(place, lookahead, train):
    technique = shoal.Spilled(
        shards=6,
        optimizer=place,
        lookahead=lookahead,
        keep=(2,),
        boundaries="host",
        recompute=True,
    )
    recipe = zoo.recipe(clip=0.5, accumulate=2)
    moved = train(recipe, space_of("gpt"), technique, poison=True)
    away = 3 - lookahead  # of 6: not the first, nor those next to the turn
    assert len(moved) == 2
    for events in moved.values():
        stored = [e for e in events if e.action.startswith("STORE")]
        assert len(stored) == 9 * away  # steps of 2, 2, 1, 2 and 2 batches
        assert all(e.bytes > 0 for e in events if not e.action.startswith("DROP"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", sorted(forms.LAYERS))
def test_whatever_passes_between_shards_has_the_plain_bits(model, train):
    recipe = forms.recipe(clip=0.5, accumulate=3, precision="bf16", schedule=True)
    space = shoal.grid(model=[model], optimizer=["adamw"], lr=[1e-2])
    technique = shoal.Spilled(
        shards=forms.LAYERS[model], optimizer="host", lookahead=0, boundaries="host"
    )
    train(recipe, space, technique)


class Still(traps.Chain):
    """Draws nothing."""

    def make_block(self, index: int) -> nn.Module:
        return nn.Sequential(nn.Linear(traps.WIDTH, traps.WIDTH), nn.GELU())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("order", "precision"), [("micro", "fp32"), ("shard", "fp32"), ("shard", "bf16")]
)
def test_all_micro_batches_of_a_step_may_wait_there(order, precision, train):
    recipe = shoal.Recipe(
        model=traps.Build(Still),
        data=traps.data,
        loss=traps.loss,
        optimizer=traps.adamw,
        accumulate=3,
        clip_grad_norm=0.5,
        precision=precision,
    )
    technique = shoal.Spilled(
        shards=4, optimizer="device", lookahead=0, order=order, boundaries="host"
    )
    assert train(recipe, rates(), technique)
