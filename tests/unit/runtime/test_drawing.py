"""Whether what a model draws can be foretold is asked, and never in the way."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from shoal.partition.build import build_chain
from shoal.recipes.recipe import Recipe
from shoal.rng import capture_rng, same_rng
from shoal.runtime.measuring.drawing import with_draws
from shoal.testing import make_layer, make_measure

CPU = torch.device("cpu")


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.linear(x))


class Nested(Plain):
    """Drops of a tensor that has no size."""

    def forward(self, x):
        rows = torch.nested.as_nested_tensor(list(self.linear(x).unbind()))
        return torch.stack(list(self.dropout(rows).unbind()))


@pytest.mark.parametrize(("block", "foretold"), [(Plain, True), (Nested, False)])
@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_what_cannot_be_drawn_again_is_not_foretold_and_measured_all_the_same(block, foretold):
    batch = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    model = nn.Sequential(*[block() for _ in range(3)]).train()
    recipe = Recipe(
        model=lambda hp: model,
        data=lambda hp: ([batch] * 4, None),
        loss=lambda output, batch: ((output - batch[1]) ** 2).mean(),
        accumulate=2,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chain = build_chain(model, recipe, batch, CPU)
        whole = make_measure([make_layer("a", 100)], draws=True, num_batches=4)
        before = capture_rng(CPU)
        found = with_draws(whole, chain, batch)
    assert found.foretold is foretold
    assert bool(found.draw_bytes) is foretold
    assert same_rng(before, capture_rng(CPU))
