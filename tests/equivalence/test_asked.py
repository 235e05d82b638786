"""Code that asks whether a hyperparameter is zero: those that answer alike are in an array."""

from __future__ import annotations

import pytest
import squads
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.testing import plain_loop


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


class Scaled(nn.Module):
    """Keeps a scale as peft does, and the number that it comes from."""

    def __init__(self, alpha, counts):
        super().__init__()
        self.layer, self.lora_alpha, self.counts = nn.Linear(8, 8), {"default": alpha}, counts
        self.scaling = {"default": alpha / 4}

    def forward(self, x):
        alpha = self.lora_alpha["default"]
        more = len(range(alpha)) if self.counts else alpha
        return x + self.layer(x) * self.scaling["default"] + 0.01 * more


@pytest.mark.parametrize("counts", [False, True])
def test_scales_that_are_written_as_ints_are_each_trials_own(counts, run_study):
    recipe = shoal.Recipe(
        model=lambda hp: nn.Sequential(
            nn.Linear(6, 8), Scaled(hp["alpha"], counts), nn.Linear(8, 3)
        ),
        data=lambda hp: data({"drop": 1}),
        loss=loss,
        optimizer=lambda named, hp: torch.optim.SGD([p for _, p in named], 0.1),
    )
    space = shoal.grid(alpha=[4, 16], seed=[0])
    report = run_study(recipe, space, epochs=4, metric="train_loss", fuse=2, devices=1)

    assert sorted(squads.slots_of(report).values()) == [(0, 2), (1, 2)]
    if not counts:  # that part runs slot by slot, which may show in the last bit
        squads.assert_verified(report, recipe)
    for trial in report.trials:
        alone = plain_loop(recipe, dict(trial.hp), 0, epochs=4).model.state_dict()
        for name, tensor in trial.load().state_dict().items():
            torch.testing.assert_close(tensor, alone[name], rtol=1e-5, atol=1e-6)
