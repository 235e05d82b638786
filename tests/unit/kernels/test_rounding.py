"""Weights in bfloat16 that a step rounds by chance."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.kernels.rounding import Rounding, lower, round_into


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def rounded(value, seed=0):
    place = torch.empty_like(value, dtype=torch.bfloat16)
    round_into(place, value, generator(seed))
    return place


def test_what_bfloat16_holds_stays_as_it_is():
    value = torch.randn(1000).to(torch.bfloat16).float()
    value[:4] = torch.tensor([0.0, -0.0, 1.0, -2.0])
    assert torch.equal(rounded(value).float(), value)


def test_anything_else_goes_to_one_of_its_neighbours():
    value = torch.randn(10_000)
    found = rounded(value).float()
    spacing = 2.0 ** (value.abs().log2().floor() - 7)
    assert ((found - value).abs() < spacing).all()
    assert (found > value).any()
    assert (found < value).any()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_up_as_often_as_it_is_near(share, sign):
    value = torch.full((100_000,), sign * (1 + share * 2**-7))
    away = (rounded(value).float().abs() > 1).float().mean()
    assert away == pytest.approx(share, abs=0.01)


def test_small_steps_are_not_lost_on_average():
    weight = torch.ones(2000, dtype=torch.bfloat16)
    for step in range(200):
        round_into(weight, weight.float() + 2**-12, generator(step))
    assert weight.float().mean() == pytest.approx(1 + 200 * 2**-12, abs=2e-3)
    nearest = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(200):
        nearest = (nearest.float() + 2**-12).to(torch.bfloat16)
    assert nearest == 1


def test_infinities_and_nan_are_kept():
    value = torch.tensor([float("inf"), float("-inf"), float("nan")])
    found = rounded(value)
    assert found[:2].tolist() == [float("inf"), float("-inf")]
    assert found[2].isnan()


def linear():
    model = nn.Linear(8, 4)
    lower(model)
    return model


def stepped(seed, step, names=("weight", "bias")):
    torch.manual_seed(0)
    model = linear()
    parameters = dict(model.named_parameters())
    rounding = Rounding(parameters, seed)
    for name in names:  # in whatever order, and one by one
        with rounding.stepping([name], step):
            parameters[name].data.mul_(1.001)
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def test_the_random_bits_belong_to_the_seed_the_step_and_the_name():
    first = stepped(1, 5)
    again = stepped(1, 5, names=("bias", "weight"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(stepped(2, 5)["weight"], first["weight"])
    assert not torch.equal(stepped(1, 6)["weight"], first["weight"])


def test_no_stream_of_the_trial_is_drawn_from():
    model = linear()
    before = torch.get_rng_state()
    with Rounding(dict(model.named_parameters()), 0).stepping(["weight"], 0):
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_matrices_are_lowered_and_nothing_else():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Embedding(3, 4).double())
    lower(model)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes["0.weight"] == torch.bfloat16
    assert dtypes["0.bias"] == dtypes["1.weight"] == torch.float32
    assert dtypes["2.weight"] == torch.float64
    assert model[1].running_mean.dtype == torch.float32


def test_the_parameters_are_float32_inside_a_step_and_in_their_place_afterwards():
    model = linear()
    place = model.weight.data
    with Rounding(dict(model.named_parameters()), 0).stepping(["weight"], 0):
        assert model.weight.dtype == torch.float32
        model.weight.grad = torch.ones(4, 8)
    assert model.weight.data_ptr() == place.data_ptr()
    assert model.weight.dtype == torch.bfloat16


def test_other_precisions_are_refused_with_the_known_ones():
    with pytest.raises(
        shoal.SpecError, match="precision is 'fp32', 'bf16' or 'bf16-sr', got 'sr'"
    ):
        shoal.Recipe(model=lambda hp: None, data=lambda hp: None, precision="sr")
