"""Names in the place of parameters that attributes have."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from shoal.fusion.rows.keptparts import Part, named_parts, names_in, with_names, with_tensors


class Penalty(NamedTuple):
    weight: object
    factor: float


def test_parameters_have_names_and_come_back():
    module = nn.Linear(2, 2)
    value = [Penalty(module.weight, 0.1), {"bias": (module.bias, "text", None)}]

    named = with_names(value, named_parts(module))
    others = {"weight": torch.ones(1), "bias": torch.zeros(1)}
    filled = with_tensors(named, others)

    assert named == [Penalty(Part("weight"), 0.1), {"bias": (Part("bias"), "text", None)}]
    assert names_in(named) == ["weight", "bias"]
    assert isinstance(filled[0], Penalty)
    assert filled[0].weight is others["weight"]
    assert filled[1]["bias"][0] is others["bias"]


def test_what_has_none_is_the_same_object():
    module = nn.Linear(2, 2)
    value = [torch.ones(2), {"text": [1, 2]}, module, "weight"]

    assert with_names(value, named_parts(module)) is value
    assert with_tensors(value, {}) is value
    assert names_in(value) == []


def test_a_ring_ends():
    value: list[object] = [torch.ones(1)]
    value.append(value)

    assert names_in(value) == []
