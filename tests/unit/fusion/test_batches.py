"""Batches of all slots as one, in the structure that they have."""

from typing import NamedTuple

import pytest
import torch

from shoal.fusion.batches import combined, layout_of
from shoal.fusion.declined import Declined

pytestmark = pytest.mark.usefixtures("one_thread")


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_tensors_are_stacked_and_containers_keep_their_type():
    def batch(value):
        tensor = torch.full((2,), value)
        return {
            "pair": Pair(tensor, tensor),
            "list": [tensor],
            "tuple": (tensor, "a", 0.5 + value),
        }

    found = combined([batch(1), batch(2)], lambda stacked: stacked)

    assert isinstance(found["pair"], Pair)
    assert found["pair"].x.tolist() == [[1, 1], [2, 2]]
    assert found["list"][0].shape == (2, 2)
    assert found["tuple"][1] == "a"
    assert found["tuple"][2].values == (1.5, 2.5)


def test_other_values_that_differ_are_declined():
    with pytest.raises(Declined, match="a value in the batch differs"):
        combined([(torch.zeros(1), "a"), (torch.zeros(1), "b")], lambda stacked: stacked)


def test_a_layout_is_what_batches_must_have_in_common():
    one, same = (torch.zeros(2, 3), "a", 0.1), (torch.ones(2, 3), "a", 0.2)

    assert layout_of(one) == layout_of(same)
    for other in (
        (torch.zeros(2, 4), "a", 0.1),
        (torch.zeros(2, 3).double(), "a", 0.1),
        [torch.zeros(2, 3), "a", 0.1],
        (torch.zeros(2, 3), "b", 0.1),
        (torch.zeros(2, 3), "a"),
    ):
        assert layout_of(one) != layout_of(other)
