"""A feed: epochs that end, positions that lead back, and sources that are refused."""

from __future__ import annotations

import pickle

import kinds
import pytest
import torch
from torch.utils.data import DataLoader

from shoal.core.errors import SpecError, TrialError
from shoal.data import Feed

CPU = torch.device("cpu")


class Source:
    """As many batches as it is told, and what it says of them."""

    def __init__(self, batches, length=None):
        self.batches, self.length = batches, length

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        if self.length is None:
            raise TypeError
        return self.length


def test_an_epoch_ends_with_none_and_the_next_one_begins():
    feed = Feed([1, 2], CPU)

    assert [feed.next() for _ in range(6)] == [1, 2, None, 1, 2, None]
    assert (feed.epoch, feed.batch) == (2, 0)


def test_the_end_is_known_before_it_is_read_where_the_length_is():
    feed = Feed([1], CPU)
    assert not feed.at_end
    feed.next()
    assert feed.at_end
    feed.next()
    assert not feed.at_end


def test_a_feed_is_at_the_position_it_gave_until_it_goes_on():
    feed = Feed([1, 2], CPU)
    start = feed.position()
    feed.next()
    position = feed.position()

    assert feed.is_at(position)
    assert not feed.is_at(start)
    feed.next()
    assert not feed.is_at(position)


def test_making_an_iterator_is_part_of_a_position():
    """The first batch of an epoch is not the same as none: the order was drawn."""
    feed = Feed(DataLoader(range(4), shuffle=True), CPU)
    before = feed.position()
    feed.next()

    assert (before.begun, feed.position().begun) == (False, True)


def test_a_position_travels_between_processes():
    feed = Feed(kinds.Drawing(), CPU)
    feed.next()
    position = pickle.loads(pickle.dumps(feed.position()))

    other = Feed(kinds.Drawing(), CPU)
    other.seek(position)

    assert other.is_at(feed.position())


def test_data_without_a_batch_is_refused():
    with pytest.raises(SpecError, match="the training data yielded no batch"):
        Feed([], CPU).next()


def test_a_batch_that_is_none_is_refused():
    with pytest.raises(SpecError, match="the training data yielded None; a batch is a value"):
        Feed([None], CPU).next()


class Hungry:
    def __iter__(self):
        yield 1
        raise MemoryError("of the user's")


def test_a_source_that_has_no_memory_is_named():
    feed = Feed(Hungry(), CPU)
    feed.next()

    with pytest.raises(TrialError, match="training data took more host memory than there is: Mem"):
        feed.next()


def test_a_later_epoch_of_another_length_is_told_what_to_leave_out():
    class Grows(list):
        def __iter__(self):
            self.append(0)
            return iter(list.copy(self)[1:])

    feed = Feed(Grows([0, 0]), CPU)
    first = [feed.next() for _ in range(3)]
    with pytest.raises(TrialError, match=r"said len\(\) = 2 batches before its first epoch and y"):
        [feed.next() for _ in range(4)]
    assert first == [0, 0, None]


@pytest.mark.parametrize("length", [1, 3])
def test_data_of_another_length_than_it_says_is_refused(length):
    feed = Feed(Source([1, 2], length), CPU)

    with pytest.raises(TrialError, match=rf"says len\(\) = {length} batches but yielded 2"):
        [feed.next() for _ in range(3)]


def test_a_position_of_other_data_is_refused():
    feed = Feed([1, 2], CPU)
    feed.next()

    with pytest.raises(
        TrialError,
        match=r"found by its index and is now DataLoader over range \(place in the data: "
        r"index into a seeded sampler\)\. Resume with the data",
    ):
        Feed(DataLoader(range(4)), CPU).seek(feed.position())


@pytest.mark.parametrize("source", [list(range(2)), DataLoader(range(2))])
def test_data_that_has_become_shorter_is_refused(source):
    feed = Feed(source.__class__(range(4)), CPU)
    for _ in range(3):
        feed.next()

    with pytest.raises(TrialError, match="ended after 2 batches of an epoch of which the trial"):
        Feed(source, CPU).seek(feed.position())


def test_a_dataset_whose_generator_is_gone_is_refused():
    feed = Feed(DataLoader(kinds.OwnGenerators()), CPU)
    feed.next()

    with pytest.raises(TrialError, match=r"had a generator at dataset\.first and has none now"):
        Feed(DataLoader(kinds.Augmented()), CPU).seek(feed.position())


def test_the_rule_is_replay_once_the_dataset_was_seen_to_count():
    feed = Feed(DataLoader(kinds.Counting()), CPU)

    feed.next()

    assert feed.position().way == "replay"


def test_a_source_that_may_keep_anything_is_not_led_back_once_it_was_read():
    feed = Feed(kinds.Epochs(), CPU)
    position = feed.position()
    feed.next()

    with pytest.raises(TrialError, match="has to be read again from its first batch"):
        feed.seek(position)


def test_a_source_that_is_built_anew_is_led_back():
    feed = Feed(kinds.Drawing(), CPU, renew=kinds.Drawing)
    feed.next()
    position = feed.position()
    second = feed.next()

    feed.seek(position)

    assert feed.is_at(position)
    assert feed.next().shape == second.shape


def test_a_known_source_is_led_back_in_place():
    feed = Feed([1, 2, 3], CPU)
    feed.next()
    position = feed.position()
    feed.next()

    feed.seek(position)

    assert feed.next() == 2
