"""Attributes that have parameters of the model, in arrays: each slot's own are there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot

DOUBLE = torch.float64


class Net(nn.Module):
    """A layer of weights in a list, and a penalty of others with a factor for each."""

    def __init__(self, hp):
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 8, dtype=DOUBLE))
        self.second = nn.Parameter(torch.randn(8, 1, dtype=DOUBLE))
        self.inner = nn.Linear(4, 4, dtype=DOUBLE)
        self.odd = Odd(self.first) if hp["odd"] else nn.Identity()
        self.weights = [self.first, self.second]
        self.penalized = ((self.first, hp["decay"]), (self.inner.weight, 0.02))
        self.named = {"bias": self.inner.bias}

    def forward(self, x):
        x = self.odd((self.inner(x) @ self.weights[0]).tanh())
        penalty = sum(factor * weight.square().sum() for weight, factor in self.penalized)
        return x @ self.weights[1], penalty + self.named["bias"].abs().sum()


class Odd(nn.Module):
    """Asks for a value, so that each slot runs it by itself, and has another module's weight."""

    def __init__(self, other):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, dtype=DOUBLE))
        self.mine, self.others = (self.scale,), [other]

    def forward(self, x):
        by = 2 if x.abs().mean().item() > 0.3 else 3
        return by * x * self.mine[0] + self.others[0].mean(0)


def data(hp):
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(28, 4, generator=draws, dtype=DOUBLE)
    rows = TensorDataset(x, x.sum(1, keepdim=True))
    return DataLoader(rows, batch_size=8, shuffle=True), DataLoader(rows, batch_size=16)


def loss(output, batch):
    return F.mse_loss(output[0], batch[1]) + output[1]


@pytest.mark.parametrize(
    ("odd", "technique"),
    [(False, None), (True, None), (False, shoal.Spilled(shards=2))],
    ids=["whole", "a part slot by slot", "shards"],
)
def test_they_are_each_slots_own(odd, technique, run_study):
    recipe = shoal.Recipe(model=Net if not technique else chain, data=data, loss=loss)
    space = {
        "lr": shoal.uniform(0.01, 0.03),
        "decay": shoal.uniform(0.01, 0.1),
        "odd": shoal.choice(odd),
    }
    told = {"trials": 3, "epochs": 2}
    alone = run_study(recipe, space, **told)
    fused = run_study(recipe, space, fuse=3, technique=technique, **told)
    rows = Snapshot.of(read_outline(fused.directory)).trials
    assert [row.numerics.get("array") for row in rows] == [f"slot {n} of 3" for n in range(3)]
    for one, other in zip(alone.trials, fused.trials, strict=True):
        weights, found = (trial.load_state()["model"] for trial in (one, other))
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-12)
    assert fused.verify([0, 2])


def chain(hp):
    return nn.Sequential(*(Listed() for _ in range(3)), Ending())


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 16, dtype=DOUBLE))
        self.down = nn.Parameter(torch.randn(16, 4, dtype=DOUBLE))
        self.both = [self.up, self.down]

    def forward(self, x):
        for weight in self.both:
            x = (x @ weight).tanh()
        return x


class Ending(nn.Linear):
    def __init__(self):
        super().__init__(4, 1, dtype=DOUBLE)
        self.penalized = [self.weight]

    def forward(self, x):
        return super().forward(x), self.penalized[0].square().sum()
