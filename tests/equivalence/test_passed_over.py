"""Blocks that pass some of their code over, by a number that their batch has or by chance."""

from __future__ import annotations

import re

import torch
from torch import nn

import shoal
from shoal.recipes.recipe import Recipe

STEPS = 4


class Block(nn.Module):
    """As stochastic depth does it: what is passed over hands on what it was given."""

    def __init__(self, counts):
        super().__init__()
        self.linear, self.counts = nn.Linear(16, 16), counts
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if x[0, 0] > 50:
            return x
        if self.counts:
            self.count += 1
        return torch.cat([x[:, :1], (x + torch.tanh(self.linear(x)))[:, 1:]], dim=1)


def build(hp):
    return nn.Sequential(*(Block(hp["counts"]) for _ in range(3)), nn.Linear(16, 4))


def data(hp):
    """Nothing is passed over but by the first batch, which is the one that is recorded."""
    draws = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 16, generator=draws) for _ in range(STEPS)]
    batches[0][0, 0] = 100
    return [(x, torch.arange(8) % 4) for x in batches], None


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


RECIPE = Recipe(model=build, data=data, loss=loss)
HOST = shoal.Spilled(shards=4, optimizer="host", keep=(), keep_turn=0)


def test_blocks_with_nothing_trained_before_them_are_trained(run_study, assert_alone):
    report = run_study(RECIPE, shoal.grid(lr=[0.01], counts=[False]), steps=STEPS, technique=HOST)
    assert_alone(report, report.trials, RECIPE, steps=STEPS)


def test_a_buffer_that_is_written_later_is_not_written_twice(run_study):
    space = shoal.grid(lr=[0.01], counts=[True])
    report = run_study(RECIPE, space, steps=STEPS, technique=HOST)
    # Which of them runs again first is measured.
    words = r"wrote to the buffer '[012]\.count', which it did not in"
    assert re.search(words, report.trials[0].error)
