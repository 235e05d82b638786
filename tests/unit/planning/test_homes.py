"""Trials whose state is larger than the host may keep."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.core.errors import TooLarge
from shoal.planning import HomeRoom
from shoal.runtime.measuring.describe import _least_state
from shoal.runtime.wire.messages import Noticed

MIB = 2**20
NOTICED = {0: Noticed(state_bytes=2 * MIB), 1: Noticed(state_bytes=9 * MIB), 2: Noticed()}


def test_one_that_is_too_large_is_named_with_the_numbers():
    with pytest.raises(TooLarge, match=r"^trial 1 needs 9\.0 MiB or more .* of 8\.0 MiB.*more\.$"):
        HomeRoom(8 * MIB).refused(NOTICED)
    with pytest.raises(TooLarge, match=r"^trial 0 needs .* 2 trials do not fit: 0, 1\.$"):
        HomeRoom(MIB).refused(NOTICED)


def test_what_fits_or_has_no_bound_is_not_refused():
    assert HomeRoom(9 * MIB).refused(NOTICED) == HomeRoom().refused(NOTICED) == {}


def test_files_are_a_way_out_where_there_is_memory_to_measure_in():
    with pytest.raises(TooLarge, match=r"more, or spill_dir= \(--spill-dir\), a directory on a d"):
        HomeRoom(8 * MIB, free=9 * MIB).refused(NOTICED)


def test_of_a_search_it_fails_alone():
    assert list(HomeRoom(8 * MIB, each_alone=True).refused(NOTICED)) == [1]


def test_what_is_not_known_of_a_state_is_not_counted():
    model = nn.Linear(8, 4)
    model.bias.requires_grad_(False)
    weight, bias = 8 * 4 * 4, 4 * 4
    adam, plain = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters())
    assert _least_state(model, adam) == 4 * weight + bias
    assert _least_state(model, plain) == 2 * weight + bias
    assert _least_state(nn.Linear(8, 4), plain) == weight + bias
