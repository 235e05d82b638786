"""Batches of an array on their way to a GPU: alike ones as one copy, the others as ever."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from shoal.fusion import batches as batches_module
from shoal.fusion.batches import moved_together

Pair = namedtuple("Pair", "x y")
META = torch.device("meta")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors went in each copy; nothing is pinned where there is no GPU."""
    found: list[int] = []

    def rows(device: torch.device, tensors: Any) -> Any:
        found.append(len(tensors))
        return torch.stack(list(tensors)).unbind(0)

    monkeypatch.setattr(batches_module, "_rows_on", rows)
    monkeypatch.setattr(batches_module, "ALIGNED_BYTES", 8)
    return found


def batch(number: int, size: int = 3) -> Any:
    x = torch.arange(size * 2.0).reshape(size, 2) + number
    return {"pair": Pair(x, x.sum(1).long()), "name": "it", "weights": [x * 2, 0.5 * number]}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one) and type(one) is type(other)
    if isinstance(one, tuple | list):
        return type(one) is type(other) and all(map(same, one, other))
    return one == other


def test_alike_batches_share_a_copy_for_each_of_their_tensors(copies: list[int]) -> None:
    given = [batch(0), None, batch(2), batch(3)]
    moved = moved_together(given, META)
    assert copies == [3, 3, 3]
    assert moved[1] is None
    assert all(same(one, other) for one, other in zip(moved, given, strict=True))
    assert given[0]["pair"].x is not moved[0]["pair"].x


def test_a_batch_of_another_layout_goes_by_itself(copies: list[int]) -> None:
    given = [batch(0), batch(1, size=2), batch(2)]
    moved = moved_together(given, META)
    assert copies == [2, 2, 2]
    assert same(moved[0], given[0])
    assert same(moved[2], given[2])
    assert moved[1]["pair"].x.device == META


@pytest.mark.parametrize(
    "odd",
    [
        lambda x: x.t(),
        lambda x: x[:, 0].contiguous(),  # twelve bytes: its row would lie askew
        lambda x: x.expand(2, *x.shape),
        lambda x: x.to_sparse(),
        lambda x: x.requires_grad_(),
        lambda x: torch.nn.Parameter(x),
        lambda x: {"x": x, "text": Moves()},
    ],
)
def test_what_lies_otherwise_in_memory_goes_as_it_does_alone(copies: list[int], odd: Any) -> None:
    moved = moved_together([odd(torch.ones(3, 2)) for _ in range(2)], META)
    assert copies == []
    for one in moved:
        tensor = one["x"] if isinstance(one, dict) else one
        assert tensor.device == META


class Moves:
    """A value of the user's that is asked to move itself."""

    def to(self, device: torch.device) -> Moves:
        assert device == META
        return self
