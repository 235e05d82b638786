"""What a recipe says of stale weights, and how what they are worth is measured."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.errors import SpecError
from shoal.efficiency import compared, first_below, smoothed
from shoal.recipes.recipe import Recipe
from shoal.resume.recipe import describe_recipe
from shoal.testing import stale_efficiency

# -- said --------------------------------------------------------------------------------------


@pytest.mark.parametrize("efficiency", [0, -0.5, 1.01, math.nan, math.inf, "0.8", True, None])
def test_an_efficiency_that_is_no_part_is_refused_with_what_was_given(efficiency):
    with pytest.raises(SpecError, match="above 0 and up to 1, got") as found:
        shoal.Stale(efficiency=efficiency)
    assert repr(efficiency) in str(found.value)
    assert "stale_efficiency" in str(found.value)


def test_there_is_no_default_for_what_has_to_be_known():
    with pytest.raises(TypeError):
        shoal.Stale()
    with pytest.raises(SpecError, match="predict"):
        shoal.Stale(efficiency=0.5, predict=1)
    assert shoal.Stale(efficiency=1) == shoal.Stale(efficiency=1.0)


def recipe(**changes):
    return Recipe(**({"model": model, "data": data, "loss": loss} | changes))


def test_a_recipe_takes_nothing_else():
    assert recipe().stale is None
    with pytest.raises(SpecError, match=r"shoal.Stale\(efficiency=...\) or None, got 0.8"):
        recipe(stale=0.8)
    with pytest.raises(SpecError, match="takes the newest weights"):
        recipe(stale=shoal.Stale(efficiency=0.8), step=lambda *args: None, loss=None)


def test_what_is_allowed_is_on_record_and_makes_no_other_recipe():
    plain, stale = recipe(), recipe(stale=shoal.Stale(efficiency=0.8))
    records = [describe_recipe(one) for one in (plain, stale, recipe(splittable=True))]
    assert "stale" not in records[0].fields
    assert records[1].fields["stale"] == "Stale(efficiency=0.8, predict=False)"
    assert all(one.is_same(other) for one in records for other in records)
    assert records[0].allowing(records[1]) == records[1]
    assert records[1].allowing(records[0]) == records[0]
    assert not records[1].is_same(describe_recipe(recipe(accumulate=2)))


# -- measured ----------------------------------------------------------------------------------


def model(hp):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))


def data(hp):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 8, generator=generator)
    y = (x @ torch.randn(8, 3, generator=generator)).argmax(-1)
    return [(x[i : i + 8], y[i : i + 8]) for i in range(0, 64, 8)], None


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sgd(named_parameters, hp):
    parameters = [parameter for _, parameter in named_parameters]
    return torch.optim.SGD(parameters, lr=hp["lr"], momentum=hp.get("momentum", 0.0))


def line(hp):
    torch.manual_seed(3)
    return nn.Linear(8, 3)


def one_batch(hp):
    batches = data(hp)[0]
    return [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))], None


def squared(output, batch):
    return F.mse_loss(output, F.one_hot(batch[1], 3).float(), reduction="sum") / len(output)


def test_at_a_small_rate_a_stale_step_is_worth_nearly_a_whole_one():
    found = stale_efficiency(recipe(optimizer=sgd), {"lr": 0.02}, steps=100, seeds=(0, 1))
    assert 0.9 < found.efficiency <= 1.0
    assert not found.stuck
    assert found.stale() == shoal.Stale(efficiency=found.efficiency)
    assert str(found).startswith("100 steps with weights one step old came as far as 9")
    for one in found.seeds:
        assert len(one.synchronous) == len(one.stale) == 100
        assert one.synchronous[0] == one.stale[0]


def test_at_a_large_rate_it_is_worth_less_or_nothing_and_a_guess_more():
    small, large = {"lr": 0.05}, {"lr": 0.3, "momentum": 0.9}
    worth = [stale_efficiency(recipe(optimizer=sgd), hp, steps=60) for hp in (small, large)]
    assert worth[1].efficiency < worth[0].efficiency


def test_a_training_that_is_stuck_is_called_so():
    """Of a parabola: old gradients diverge at half the rate at which new ones do."""
    some = recipe(model=line, data=one_batch, loss=squared, optimizer=sgd)
    found = stale_efficiency(some, {"lr": 0.4}, steps=60, seeds=(0,))
    assert found.efficiency == 0.0
    assert found.stuck == (0,)
    assert "made no progress with 1 of 1 seed (0)" in str(found)
    with pytest.raises(SpecError, match="made no progress"):
        found.stale()


def test_pieces_of_batches_are_those_of_a_pipeline():
    some = recipe(optimizer=sgd, accumulate=2, splittable=True)
    found = stale_efficiency(some, {"lr": 0.02}, steps=20, micro_batches=4)
    assert found.seeds[0].window == 5
    for asked, words in ((3, "no multiple of the 2"), (0, "no multiple")):
        with pytest.raises(SpecError, match=words):
            stale_efficiency(some, {"lr": 0.02}, steps=20, micro_batches=asked)
    with pytest.raises(SpecError, match="splittable=True"):
        stale_efficiency(recipe(), {"lr": 0.02}, steps=20, micro_batches=4)


def test_too_few_steps_or_seeds_are_refused():
    with pytest.raises(SpecError, match="fewer than 20 steps"):
        stale_efficiency(recipe(), {"lr": 0.1}, steps=19)
    with pytest.raises(SpecError, match="one seed or more"):
        stale_efficiency(recipe(), {"lr": 0.1}, steps=20, seeds=())


def test_a_curve_is_met_between_two_steps():
    assert first_below([4.0, 3.0, 2.0, 1.0], 2.5) == 2.5
    assert first_below([4.0, 3.0, 3.5, 1.0], 3.0) == 2.0
    assert first_below([4.0, 3.0], 5.0) == 1.0
    assert first_below([4.0, 3.0], 1.0) == 2.0
    assert smoothed([1.0, 3.0, math.nan, 5.0], 2) == [1.0, 2.0, math.inf, math.inf]


def test_half_as_quick_a_fall_is_half_the_worth_and_a_flat_end_above_is_stuck():
    plain = [10 - 0.05 * step for step in range(100)]
    half = [10 - 0.025 * step for step in range(100)]
    found = compared(0, plain, half)
    assert found.efficiency == pytest.approx(0.5, abs=0.05)
    assert compared(0, plain, plain).efficiency == 1.0
    stuck = [max(10 - 0.05 * step, 8.0) for step in range(100)]
    assert compared(0, plain, stuck).is_stuck
    both = [max(10 - 0.2 * step, 6.0) for step in range(100)]
    assert not compared(0, both, both).is_stuck  # both have come to the end
    assert compared(0, plain, [*plain[:99], math.nan]).is_stuck
    with pytest.raises(SpecError, match="made no progress in 30 steps"):
        compared(0, [1.0] * 30, [1.0] * 30)
