"""Buffers that no forward wrote to so far: who runs one again hears of it where one does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.core.errors import TrialError
from shoal.partition.build import build_chain
from shoal.partition.preserve import Unwritten
from shoal.recipe import Recipe


@pytest.fixture
def block():
    made = nn.Linear(2, 2)
    made.register_buffer("cache", torch.ones(3))
    return made


def add(block):
    block.cache += 1


def make_anew(block):
    block.cache = block.cache + 1


@pytest.mark.parametrize("write", [add, make_anew])
def test_what_would_be_written_twice_is_named(write, block):
    watch = Unwritten({"one": block}, ())
    with pytest.raises(TrialError, match=r"wrote to the buffer 'one\.cache'"), watch.required():
        write(block)


def lengthen(block):
    block.cache = torch.ones(5)


def make_the_same(block):
    block.cache = torch.ones(3)


def read(block):
    block.cache.sum()


@pytest.mark.parametrize("do", [lengthen, make_the_same, read])
def test_what_comes_to_the_same_twice_may_be_done(do, block):
    with Unwritten({"one": block}, ()).required():
        do(block)


def test_of_what_is_known_to_change_there_are_copies(block):
    with Unwritten({"one": block}, [block.cache]).required():
        add(block)


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm

    def forward(self, x):
        return self.norm(self.linear(x))


def test_a_norm_that_blocks_share_is_known_to_change_in_each_of_them():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(Block(norm), Block(norm), nn.Linear(4, 2))
    recipe = Recipe(model=lambda hp: model, data=lambda hp: None, loss=lambda y, batch: y.sum())
    batch = (torch.randn(3, 4),)
    chain = build_chain(model, recipe, batch, torch.device("cpu"))
    with chain.unwritten(2, 3).required():
        model[1](*batch)
