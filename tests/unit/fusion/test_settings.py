"""What steps find in globals is told of once, however it is tied together."""

from __future__ import annotations

import torch
from torch import nn

import shoal
from shoal.fusion.settings import MOST, configuration
from shoal.pystate import ambient


class Node:
    def __init__(self, parent=None, children=0):
        self.parent = parent
        self.children = [Node(self) for _ in range(children)]


TREE = Node(children=100)
TABLE = {str(row): {str(column): column for column in range(500)} for row in range(500)}


class Reads(nn.Module):
    def forward(self, x):
        return x + len(TREE.children) + TABLE["0"]["1"]


def told():
    recipe = shoal.Recipe(
        model=lambda hp: Reads(), data=lambda hp: ([], None), loss=lambda output, batch: output
    )
    with ambient.watching(recipe):
        return configuration(recipe, Reads())


def test_objects_that_lead_back_to_each_other_are_told_of_once():
    places = [place for place in told() if "TREE" in place]
    assert 0 < len(places) <= 2 * 101


def test_of_a_large_table_so_much_is_told():
    places = [place for place in told() if f"{__name__}.TABLE" in place]
    assert 0 < len(places) <= MOST


def test_words_are_of_what_a_tensor_holds(monkeypatch):
    monkeypatch.setitem(TABLE, "0", {"1": torch.zeros(99_999)})
    before = told()
    TABLE["0"]["1"].fill_(1.0)
    assert told() != before
