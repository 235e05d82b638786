"""Whether values of two processes are the same is told by their bytes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from shoal.pystate import fingerprints
from shoal.pystate.fingerprints import of_numbers, of_simple

SAME = [
    (lambda: torch.arange(6.0).reshape(2, 3), lambda: torch.arange(6.0).reshape(2, 3).clone()),
    (lambda: torch.arange(6).reshape(2, 3).T, lambda: torch.arange(6).reshape(2, 3).T),
    (lambda: torch.ones(1).expand(10**12), lambda: torch.ones(1).expand(10**12)),
    (lambda: torch.ones(2, 2, dtype=torch.bfloat16), lambda: torch.ones(2, 2).bfloat16()),
    (lambda: torch.arange(9)[::2], lambda: torch.arange(0, 9, 2)),
    (lambda: torch.tensor(3.0, requires_grad=True), lambda: torch.tensor(3.0)),
    (lambda: torch.zeros(0, 3), lambda: torch.zeros(0, 3)),
    (lambda: np.array(["a", "b"]), lambda: np.array(["a", "b"])),
    (lambda: np.asfortranarray(np.ones((2, 3))), lambda: np.asfortranarray(np.ones((2, 3)))),
    (lambda: np.arange(9)[::-1], lambda: np.arange(8, -1, -1)),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_numbers_have_one_fingerprint(one, other):
    assert of_numbers(one()) == of_numbers(other())


def test_other_numbers_have_another():
    one = torch.arange(8.0, dtype=torch.float64)
    found = {of_numbers(one), of_numbers(one.flip(0)), of_numbers(one.view(torch.int64))}
    for places in ([0], [1, 2], [3, 4, 5, 6]):
        other = one.clone()
        other[places] *= -1  # the highest bits, which sums modulo a power of 2 lose in pairs
        found.add(of_numbers(other))
    assert len(found) == 6


def test_of_a_larger_one_blocks_from_all_over_are_looked_at(monkeypatch):
    monkeypatch.setattr(fingerprints, "_BLOCK", 8)
    one = np.zeros(1000, np.uint8)
    assert of_numbers(one, 64) == of_numbers(one.copy(), 64)
    for place in (0, 999):
        other = one.copy()
        other[place] = 1
        assert of_numbers(other, 64) != of_numbers(one, 64)


def test_texts_that_are_one_object_or_two_and_sets_in_any_order_are_the_same():
    text, other = "a-b", "-".join(["a", "b"])
    assert of_simple([text, text]) == of_simple([text, other])
    assert of_simple(["a", 1]) != of_simple(["a", 1.0])
    code = (
        "from shoal.pystate.fingerprints import of_simple; "
        "print(of_simple({str(n) for n in range(99)}).digest)"
    )
    here = of_simple({str(n) for n in range(99)}).digest
    assert int(subprocess.check_output([sys.executable, "-c", code])) == here
