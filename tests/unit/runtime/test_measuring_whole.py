"""How often a whole model runs before it is known how it trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.core.spec import TrialSpec
from shoal.core.technique import Resident
from shoal.device import open_device
from shoal.planner.need import Request, need
from shoal.recipes.recipe import Recipe
from shoal.runtime.measuring.measure import Measurer
from shoal.runtime.wire.messages import Measure
from shoal.testing import make_device

TRIAL = TrialSpec(number=0, hp={"lr": 0.1}, seed=0)
REQUEST = Request(micro_batches=1, clip=False, technique=None, prefers="host")
OPTIMIZERS = {
    "sgd": lambda named, hp: torch.optim.SGD([p for _, p in named], lr=0.1),
    "adamw": lambda named, hp: torch.optim.AdamW([p for _, p in named], lr=0.1),
}


def measured(memory, optimizer):
    """What a model takes, and how often it ran with gradients."""
    runs = []

    class Model(nn.Sequential):
        def forward(self, x):
            runs.append(torch.is_grad_enabled())
            return super().forward(x)

    recipe = Recipe(
        model=lambda hp: Model(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)),
        data=lambda hp: ([(torch.randn(32, 8), torch.zeros(32, dtype=torch.long))], None),
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
        optimizer=OPTIMIZERS[optimizer],
    )
    device = open_device(make_device(memory=memory))
    found = Measurer(recipe, device).answer(Measure(TRIAL, cut=False))
    return found, sum(runs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_whole_model_is_timed_only_where_it_may_fit(optimizer):
    found, runs = measured(2**20, optimizer)
    measure = found.measure
    whole = need(measure, measure.shards, Resident(), REQUEST, found.layout)
    assert measured(whole.total, optimizer)[1] == runs == 3  # one is counted, two are timed
    too_large, once = measured(whole.total // 2, optimizer)
    assert once == 1
    assert too_large.measure.shards[0].backward_s > 0
    assert too_large.layout == found.layout
