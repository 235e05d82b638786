"""Models whose own ``train()`` and ``eval()`` write to their weights, as LoRA's merge theirs."""

from __future__ import annotations

import pytest
import torch
from companies import member_of
from torch import nn
from torch.nn import functional as F

from shoal.core import arraykeys
from shoal.fusion import Array, Declined
from shoal.fusion.passes.fused import StackedBackend
from shoal.recipes.recipe import Recipe
from shoal.testing import array_loop, plain_loop

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCHS = 3


class Merging(nn.Linear):
    """For evaluation its weight has the product of two small ones, and no more in training."""

    def __init__(self, write) -> None:
        super().__init__(8, 8, dtype=torch.float64)
        self.a, self.b = (nn.Parameter(torch.randn(n, m).double()) for n, m in ((8, 2), (2, 8)))
        self.write, self.merged = write, False
        self.weight.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        if mode is self.merged:
            self.write(self, (-1 if mode else 1) * (self.a @ self.b).detach())
            self.merged = not mode
        return self

    def forward(self, x):
        y = super().forward(x)
        return y if self.merged else y + x @ self.b.T @ self.a.T


def into_data(layer, change):
    layer.weight.data += change


def in_place(layer, change):
    with torch.no_grad():
        layer.weight.add_(change)


def by_data(layer, change):
    layer.weight.data = layer.weight.data + change


def model(hp):
    if hp["base"]:
        torch.manual_seed(0)
    return nn.Sequential(Merging(hp["write"]), nn.Tanh(), nn.Linear(8, 2, dtype=torch.float64))


def data(hp):
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batches = list(zip(x.split(4), (x.sum(1) > 0).long().split(4), strict=True))
    return batches, batches[:1]


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sgd(named, hp):
    return torch.optim.SGD([p for _, p in named if p.requires_grad], lr=0.1)


RECIPE = Recipe(model=model, data=data, loss=loss, optimizer=sgd)


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("write", [into_data, in_place, by_data])
def test_each_slot_of_an_array_has_what_its_own_model_wrote(write, slot):
    hp = {"write": write, "base": False}
    alone = plain_loop(RECIPE, hp, 0, epochs=EPOCHS)
    found = array_loop(RECIPE, hp, 0, slot=slot, width=2, epochs=EPOCHS)
    assert found.metrics == pytest.approx(alone.metrics)
    for name, weight in alone.state()["model"].items():
        torch.testing.assert_close(found.state()["model"][name], weight, msg=name)


@pytest.mark.parametrize("write", [into_data, in_place, by_data])
def test_a_base_that_is_there_once_is_not_written_to(write, monkeypatch):
    monkeypatch.setattr(arraykeys, "LEAST_BASE_BYTES", 256)
    members = [member_of(RECIPE, {"write": write, "base": True}, seed) for seed in range(3)]
    array = Array(members, backend=StackedBackend(), one_base=True)
    with pytest.raises(Declined, match=r"'0\.weight'"):
        array.set_training(False)
