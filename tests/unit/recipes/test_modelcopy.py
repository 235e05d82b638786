"""Copies of modules are whole: what their own functions call is the copy's, too."""

import copy

import torch
from torch import nn

from shoal.recipes.modelcopy import deepcopied


class Block(nn.Module):
    def __init__(self, outside):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        inner, scale = self.inner, 2.0

        def call(x, *, more=1.0):
            return outside(inner(x)) * scale * more

        self.call = call


def test_a_function_that_closes_over_a_part_closes_over_that_of_the_copy():
    outside, x = nn.Linear(2, 2), torch.ones(1, 2)
    block = Block(outside)
    before = block.call(x)

    made = deepcopied(nn.Sequential(block), {})[0]
    nn.init.zeros_(made.inner.weight), nn.init.zeros_(made.inner.bias)

    assert torch.equal(made.call(x, more=3.0), (outside.bias * 6.0)[None])
    assert torch.equal(block.call(x), before)
    assert torch.equal(copy.deepcopy(block).call(x), before)
