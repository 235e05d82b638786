"""Gradients of several passes of one step: each slot has those of the passes it took part in."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.fusion import Declined
from shoal.fusion.passes.gathered import Gathered

NOBODYS = math.nan  # what a pass may leave in the rows of slots that take no part


@pytest.fixture
def block():
    return torch.zeros(3, 2).requires_grad_()


def trained(gathered, block, rows):
    """A pass of the slots that ``rows`` names, and what it leaves."""
    with gathered.adding(list(rows)):
        assert block.grad is None
        block.grad = torch.full((3, 2), NOBODYS)
        for slot, value in rows.items():
            block.grad[slot] = value


def test_a_row_is_of_the_pass_in_which_its_slot_took_part(block):
    gathered = Gathered({"w": block})
    trained(gathered, block, {0: 1.0, 2: 3.0})
    trained(gathered, block, {1: 2.0})
    assert block.grad.tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    gathered.require_even(range(3))


def test_what_a_later_batch_of_the_step_leaves_is_added(block):
    gathered = Gathered({"w": block})
    trained(gathered, block, {0: 1.0})
    trained(gathered, block, {1: 2.0, 2: 3.0})
    trained(gathered, block, {0: 10.0, 2: 30.0})
    trained(gathered, block, {1: -0.0})
    assert block.grad.tolist() == [[11.0, 11.0], [2.0, 2.0], [33.0, 33.0]]


def test_a_gradient_whose_rows_share_memory_is_written_to_row_by_row(block):
    gathered = Gathered({"w": block})
    with gathered.adding([0, 1]):
        block.grad = torch.ones(1).expand(3, 2)
    trained(gathered, block, {2: 5.0})
    assert block.grad.tolist() == [[1.0, 1.0], [1.0, 1.0], [5.0, 5.0]]


def test_who_has_no_gradient_where_others_have_one_is_told(block):
    gathered = Gathered({"w": block})
    trained(gathered, block, {0: 1.0})
    with gathered.adding([1]):
        pass
    gathered.require_even([0])
    with pytest.raises(Declined, match="some lengths use 'w' and others do not: slot 1 has no"):
        gathered.require_even([0, 1])


def test_a_pass_that_raises_leaves_what_was_there(block):
    gathered = Gathered({"w": block})
    trained(gathered, block, {0: 1.0})
    before = block.grad
    with pytest.raises(RuntimeError), gathered.adding([1]):
        raise RuntimeError
    assert block.grad is before
