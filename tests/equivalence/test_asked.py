"""Code that asks whether a hyperparameter is zero: those that answer alike are in an array."""

from __future__ import annotations

import pytest
import squads
import torch
from torch import nn
from torch.nn import functional as F

import shoal


class Attends(nn.Module):
    """torch's attention asks for its rate where it returns weights."""

    def __init__(self, rate):
        super().__init__()
        self.first = nn.Linear(1, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=rate, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.first(x[..., None])
        return self.last(self.attention(hidden, hidden, hidden)[0].mean(1))


class Part(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate, self.layer = rate, nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.layer(x)
        return F.dropout(hidden, self.rate, self.training) if self.rate > 0 else hidden


MODELS = {
    "attention": Attends,
    "one's own": lambda rate: nn.Sequential(nn.Linear(6, 8), Part(rate), nn.Linear(8, 3)),
}


def data(hp):
    draws = torch.Generator().manual_seed(1)
    count = 2 if hp["drop"] == 0 else 6  # those that answer otherwise are through first
    x = torch.randn(count, 5, 6, generator=draws)
    return [(batch, (batch[:, 0] > 0).long()) for batch in x], None


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


@pytest.mark.parametrize("name", MODELS)
def test_whose_answers_differ_share_no_array_and_bits_do_not_depend_on_company(name, run_study):
    recipe = shoal.Recipe(
        model=lambda hp: MODELS[name](hp["drop"]),
        data=data,
        loss=loss,
        optimizer=lambda named, hp: torch.optim.SGD([p for _, p in named], hp["lr"]),
    )
    report = run_study(
        recipe,
        shoal.grid(lr=[0.1, 0.05], drop=[0.0, 0.1, 0.3]),
        epochs=4,
        metric="train_loss",
        fuse=2,
        devices=1,
    )
    assert set(squads.widths(report)) == {2}
    squads.assert_arrayed(report, report.trials, recipe, 2, epochs=4)
