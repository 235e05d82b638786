"""A slot that takes no part in a micro-batch keeps its gradients, whatever its neighbours see."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.fusion import Array, Member, backend_of
from shoal.recipe import Recipe
from shoal.rng import capture_rng


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def members():
    torch.manual_seed(3)
    recipe = Recipe(model=lambda hp: None, data=lambda hp: ([], None), loss=loss, accumulate=2)
    made = []
    for _ in range(2):
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        steps = torch.optim.SGD(net.parameters(), lr=0.1)
        values = {"module": net, "optimizer": steps, "schedule": None, "rng": capture_rng()}
        made.append(Member(recipe=recipe, hp={}, **values))
    return made


def batch(fill=None):
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)
    return (x if fill is None else torch.full_like(x, fill)), torch.tensor([0, 1, 2, 0, 1])


def stepped(kind, order, fill):
    """The weights of slot 1, whose neighbour has a batch of ``fill`` where it has none."""
    array = Array(members(), backend=backend_of(kind))
    rows = [[batch(), batch()], [batch(fill), None]]
    for _ in range(3):
        failures = array.step(*(rows if order == "later" else rows[::-1])).failures
        assert 1 not in failures
    return array.extract(1)["model"]


@pytest.mark.parametrize("kind", ["eager", "traced"])
@pytest.mark.parametrize("order", ["later", "earlier"])
def test_what_a_neighbour_has_then_is_nothing_to_it(kind, order):
    usual, spoilt = stepped(kind, order, 0.5), stepped(kind, order, torch.nan)
    assert all(torch.equal(usual[name], spoilt[name]) for name in usual)
