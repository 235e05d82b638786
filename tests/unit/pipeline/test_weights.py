"""Two versions of a stage's weights, by the user's own optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.pipeline.weights import Weights
from shoal.testing import same_bits


def make(versions=2, predict=False, kind=torch.optim.AdamW):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = kind(model.parameters(), lr=0.1)
    params = dict(model.named_parameters())
    owned = [name for name in params if not name.startswith("0.")]
    return model, Weights(params, optimizer, owned, [], versions=versions, predict=predict)


def backward(model, seed):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def stepped(weights, model, number):
    backward(model, number)
    weights.harvest(number)
    weights.step(number)


def test_a_version_that_is_in_use_does_not_change():
    model, weights = make()
    before = values(model)
    stepped(weights, model, 0)
    weights.bind(0)
    assert all(same_bits(t, before[n]) for n, t in values(model).items())
    weights.bind(1)
    changed = {n for n, t in values(model).items() if not same_bits(t, before[n])}
    assert changed == {n for n in before if not n.startswith("0.")}


def test_a_step_between_forward_and_backward_is_not_seen_by_the_graph():
    model, weights = make()
    alone, _ = make()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(9))
    alone(x).square().sum().backward()
    backward(model, 1)
    weights.harvest(0)
    loss = model(x).square().sum()  # with version 0
    weights.step(0)  # into the other bank
    weights.bind(1)
    weights.bind(0)
    model[0].zero_grad()
    loss.backward()
    for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert same_bits(parameter.grad, other.grad)


def test_gradients_of_the_next_step_stay_where_they_are():
    model, weights = make()
    backward(model, 1)
    weights.harvest(0)
    backward(model, 2)
    later = {n: p.grad.clone() for n, p in model.named_parameters() if not n.startswith("0.")}
    weights.step(0)
    for name, grad in later.items():
        assert same_bits(model.get_parameter(name).grad, grad)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_one_version_steps_as_the_optimizer_does(kind):
    model, weights = make(versions=1, kind=kind)
    alone, _ = make(kind=kind)
    parts = [p for n, p in alone.named_parameters() if not n.startswith("0.")]
    optimizer = kind(parts, lr=0.1)
    for number in range(3):
        stepped(weights, model, number)
        alone.zero_grad()
        backward(alone, number)
        optimizer.step()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert same_bits(mine.detach(), other.detach())


def test_a_guess_lies_as_far_beyond_as_the_last_step_went():
    model, weights = make(predict=True)
    first = values(model)
    stepped(weights, model, 0)
    weights.bind(1)
    guessed = values(model)
    weights.newest(1)
    second = values(model)
    for name, tensor in guessed.items():
        assert same_bits(tensor, torch.add(-first[name], second[name], alpha=2)) or name[0] == "0"
