"""Batches that are larger than any before: what they allocate is to be counted."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from shoal.core.technique import Resident
from shoal.program.ir import Action, Op
from shoal.recipes.recipe import tensors_of
from shoal.runtime.compute import Compute
from shoal.runtime.task import Task
from shoal.runtime.units import Micro


def sees_growth(*batches) -> list[bool]:
    """Whether a trial's units see each of these batches to be larger than those before."""
    session = SimpleNamespace(
        job=SimpleNamespace(technique=Resident()),
        binding=SimpleNamespace(params={}),
        units=SimpleNamespace(begin=Micro),
        fetch=lambda task, micro: batches[micro],
    )
    compute, task, found = Compute(session, []), Task(None, "step"), []
    for micro in range(len(batches)):
        compute.grew = False
        compute.begin(task, Action(Op.B, 0, micro))
        found.append(compute.grew)
    return found


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_larger_batch_is_seen_in_any_mapping(kind):
    """As that of transformers' tokenizers, into which torch's pytrees do not look."""
    assert tree_leaves(UserDict(x=torch.ones(1)))[0].keys() == {"x"}
    small, large = ([kind(x=torch.ones(rows, 4)), torch.ones(2)] for rows in (2, 3))

    assert sees_growth(small, small, large, small) == [True, False, True, False]


def test_tensors_come_in_the_order_of_a_batch():
    one, two, three, four = map(torch.full, [()] * 4, range(4))
    batch = (one, {"a": [two, 5]}, UserDict(b=three, c=[four, None]))

    assert list(map(int, tensors_of(batch))) == [0, 1, 2, 3]
