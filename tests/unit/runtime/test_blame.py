"""Where a pass of an array has no room, those leave it whose batches are the largest."""

from __future__ import annotations

import pytest
import torch

from shoal.core.errors import CapacityError
from shoal.runtime.arrays.blame import Blame

NO_ROOM = CapacityError("cannot reserve 4.0 KiB on cpu:0 for 'the running unit'")


def told(rows, error=NO_ROOM):
    """What the slots 0 to 2 are told of a pass over such batches, by their numbers of rows."""
    blame = Blame()
    batches = [[size and (torch.ones(size, 4),) for size in row] for row in rows]

    def fail():
        for row in batches[1:]:
            for slot, batch in enumerate(row):
                blame.note(slot, batch)
        raise error

    with pytest.raises(type(error)), blame.over(batches[0]):
        fail()
    return blame.told(error, range(3))


def blamed(rows, error=NO_ROOM):
    return [slot for slot, words in told(rows, error).items() if words is error]


def test_those_with_the_largest_batch_are_told_the_error_and_the_others_whose_it_is():
    found = told([[9, 2, 9]])
    assert found[0] is found[2] is NO_ROOM
    words = "no room for a batch of another trial: cannot reserve 4.0 KiB"
    assert str(found[1]).startswith(words)
    assert found[1].is_anothers
    assert not NO_ROOM.is_anothers


def test_a_later_micro_batch_counts_as_well():
    assert blamed([[9, 2, 9], [1, 12, None]]) == [1]


def test_who_took_no_part_is_not_to_blame():
    assert blamed([[None, 2, None]]) == [1]


def test_a_device_without_memory_is_no_other_case():
    assert blamed([[1, 2, 1]], torch.OutOfMemoryError("CUDA out of memory. Tried ...")) == [1]


def test_what_no_batch_is_to_blame_for_all_are_told():
    assert blamed([[1, 2, 3]], ValueError("no number")) == [0, 1, 2]
    blame = Blame()
    with blame.over([None, torch.ones(3), None]):
        blame.note(0, torch.ones(9))
    assert blame.told(NO_ROOM, range(3)) == dict.fromkeys(range(3), NO_ROOM)
