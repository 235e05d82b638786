"""How long batches happen to be parts no trials; their structure, and sizes that stay, do."""

from __future__ import annotations

import pytest
import torch

from shoal.fusion.matching.lengths import (
    alike,
    is_open,
    joined,
    kind_in,
    kind_of_all,
    ranges,
    settled,
    told_of_lengths,
)
from shoal.fusion.matching.match import Signature, groups
from shoal.fusion.matching.signature import kind_of


def texts(rows, length, dtype=torch.int64):
    return {"ids": torch.zeros(rows, length, dtype=dtype), "y": torch.zeros(rows)}


def kind(*lengths, rows=8, **options):
    return kind_of_all([kind_of(texts(rows, length, **options)) for length in lengths])


def signature(first, model="one"):
    return Signature((("the model", model), ("batch", first), ("the length of the data", "known")))


OPEN = "dict('ids': int64 [8, ~], 'y': float32 [8])"


def test_a_size_that_varies_within_a_trials_batches_is_open():
    assert kind(40, 31, 40) == OPEN
    assert is_open(OPEN)


def test_batches_of_one_size_are_told_as_the_first_one_is():
    assert kind(40, 40) == kind_of(texts(8, 40))
    assert not is_open(kind(40, 40))


def test_a_batch_of_fewer_rows_is_short_and_opens_nothing():
    """Wherever in an epoch it comes; its first dimension is that of all tensors."""
    assert kind_of_all([kind_of(texts(n, 40)) for n in (8, 3, 8)]) == kind_of(texts(8, 40))
    assert kind_of_all([kind_of(texts(8, 40)), kind_of(texts(3, 31))]) == OPEN


def test_a_first_dimension_that_is_a_length_is_open():
    batches = [[torch.zeros(length, 8), torch.zeros(8)] for length in (40, 31)]
    assert kind_of_all([kind_of(b) for b in batches]) == "list(float32 [~, 8], float32 [8])"


def test_another_structure_among_a_trials_batches_opens_nothing():
    first = kind_of(texts(8, 40))
    others = [kind_of([torch.zeros(8, 31)]), kind_of(texts(8, 40, torch.int32))]
    assert kind_of_all([first, *others]) == first
    assert kind_of_all([kind_of(torch.zeros(8, 4)), kind_of(torch.zeros(8))]) == "float32 [8, 4]"


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (kind(37, 25), OPEN),
        (kind(37, 37), OPEN),  # whose batches looked at were of one length by luck
        (kind(37, 25, rows=16), None),  # a batch size is no length
        (kind(37, 25, dtype=torch.int32), None),
        (kind_of(torch.zeros(8, 37)), None),
    ],
)
def test_kinds_join_where_sizes_differ_that_are_open(other, found):
    assert joined(OPEN, other) == found


def test_two_sizes_of_which_none_varies_are_two_kinds():
    assert joined(kind(32), kind(64)) is None
    assert settled({0: kind(32), 1: kind(64)}, {}) == {0: kind(32), 1: kind(64)}


def test_what_is_open_in_either_is_open_in_both():
    one, other = "list(int64 [8, ~], int64 [8, 5])", "list(int64 [8, 6], int64 [8, ~])"
    both = "list(int64 [8, ~], int64 [8, ~])"
    assert settled({0: one, 1: other}, {}) == {0: both, 1: both}


@pytest.mark.parametrize("turned", [False, True])
def test_equal_trials_are_one_shape_however_long_their_first_batches_are(turned):
    kinds = {0: kind(40, 40), 1: kind(31, 40), 2: kind(25, 30), 3: kind(25, 30, rows=16)}
    numbers = sorted(kinds, reverse=turned)
    facts = {n: signature(kind_of(texts(16 if n == 3 else 8, 20 + n))) for n in numbers}
    found = alike(facts, {n: kinds[n] for n in numbers}, {})
    assert len(groups([*found.values()])) == 2
    assert [kind_in(found[n]) for n in range(3)] == [OPEN] * 3
    assert told_of_lengths(found.values())[-1].startswith("    batches vary in length: dict(")


def test_other_models_stay_apart_and_open_nothing_of_each_other():
    facts = {0: signature(kind(40), "one"), 1: signature(kind(31), "other")}
    found = alike(facts, {0: kind(40, 40), 1: kind(31, 25)}, {})
    assert [kind_in(found[n]) for n in (0, 1)] == [kind(40), OPEN]


def test_trials_on_record_keep_their_kind_and_later_ones_come_to_it():
    first = kind(40)
    facts = {n: signature(first) for n in range(3)}
    found = alike(facts, {0: kind(40, 31), 1: OPEN, 2: first}, {0: first}, [signature(OPEN)])
    assert [kind_in(found[n]) for n in range(3)] == [first, OPEN, OPEN]


def test_sizes_that_vary_are_told_from_the_least_to_the_most():
    kinds = [kind_of(texts(8, length)) for length in (40, 31, 36)]
    assert ranges(kinds) == "[8, 31 to 40]"
    assert ranges(kinds[:1]) == ""


def test_sizes_are_told_of_batches_that_are_built_like_the_first_one():
    """Some may have an item more, or a dimension."""
    more = kind_of({**texts(8, 50), "w": torch.zeros(8)})
    flat = kind_of({**texts(8, 50), "y": torch.zeros(8, 1)})
    assert ranges([kind(40), more, kind(31), flat]) == "[8, 31 to 40]"
    assert ranges([kind(40), more]) == ""
