"""Micro-batches in the plain loop's order, and how many each step takes."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, IterableDataset

from shoal.core.errors import SpecError, TrialError
from shoal.pipeline.feed import Feed, group_sizes
from shoal.recipes.recipe import chunks


@pytest.mark.parametrize("count", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_groups_are_those_of_the_plain_loop(count, accumulate):
    train = list(range(count))
    expected = [list(group) for _ in range(3) for group in chunks(train, accumulate)]
    sizes = group_sizes(train, accumulate, len(expected))
    assert list(sizes) == [len(group) for group in expected]
    feed = Feed(train)
    found = [[feed.fetch(step) for _ in range(size)] for step, size in enumerate(sizes)]
    assert found == expected


def test_nothing_is_fetched_before_it_is_asked_for():
    seen = []

    class Source:
        def __iter__(self):
            for number in range(5):
                seen.append(number)
                yield number

    feed = Feed(Source())
    assert seen == [0]
    assert feed.first == 0
    assert feed.fetch(0) == 0
    assert seen == [0]
    feed.fetch(0)
    assert seen == [0, 1]


def test_data_without_a_length_has_whole_groups():
    assert group_sizes(iter([1, 2, 3]), 2, 4) == (2, 2, 2, 2)
    stream = DataLoader(Stream(), batch_size=1)
    assert group_sizes(stream, 2, 3) == (2, 2, 2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_an_epoch_that_ends_within_a_group_is_told():
    class Source:
        def __iter__(self):
            return iter([1, 2, 3])

    feed = Feed(Source())
    feed.fetch(0)
    feed.fetch(0)
    feed.fetch(1)
    with pytest.raises(TrialError, match="ended within step 2"):
        feed.fetch(1)


def test_no_data_is_refused():
    with pytest.raises(SpecError, match="no batches"):
        group_sizes([], 2, 1)
    with pytest.raises(TrialError, match="no batches"):
        Feed([])
