"""What a model's code returns for all slots comes apart into what each returns alone."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from shoal.fusion.passes.outputs import by_slot, taken_apart
from shoal.fusion.rows.perslot import PerSlot

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True, slots=True)
class Frozen:
    scores: torch.Tensor
    rate: float
    name: str


STACKED, RATE = torch.arange(6.0).reshape(2, 3), PerSlot([0.1, 0.2])


@pytest.mark.parametrize(
    ("output", "look"),
    [
        (STACKED, lambda found: (found, None)),
        ((None, STACKED, RATE), lambda found: (found[1], found[2])),
        ({"a": [STACKED], "b": RATE}, lambda found: (found["a"][0], found["b"])),
        (Pair(STACKED, RATE), lambda found: (found.first, found.second)),
        (Frozen(STACKED, RATE, "x"), lambda found: (found.scores, found.rate)),
        (SimpleNamespace(all=[STACKED, {"r": RATE}]), lambda f: (f.all[0], f.all[1]["r"])),
    ],
)
def test_each_slot_gets_its_rows_and_its_own_floats(output, look):
    tensors, form = taken_apart(output)
    assert len(tensors) == 1
    for slot, mine in enumerate(by_slot(form, tensors, 2)):
        assert type(mine) is type(output)
        row, rate = look(mine)
        assert torch.equal(row, STACKED[slot])
        if rate is not None:
            assert type(rate) is float
            assert rate == RATE.values[slot]


def test_what_is_the_same_for_all_is_handed_on_as_it_is():
    shared = SimpleNamespace(names=["a", "b"], parent=None)
    shared.parent = shared  # a circle
    tensors, form = taken_apart((shared, len, 3, torch.float32, None))
    found = by_slot(form, tensors, 2)
    assert found[0][0] is found[1][0] is shared
    assert found[0][1:] == (len, 3, torch.float32, None)


def test_tensors_come_in_one_order_of_every_slots_output():
    tensors, form = taken_apart({"b": STACKED, "a": SimpleNamespace(x=2 * STACKED)})
    for slot, mine in enumerate(by_slot(form, tensors, 2)):
        again, _ = taken_apart(mine)
        assert all(torch.equal(one, t[slot]) for one, t in zip(again, tensors, strict=True))
