"""How long a batch took to read, and when a plan says so."""

import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shoal.runtime.measuring import firstbatches
from shoal.runtime.measuring.firstbatches import first_batches, read_one
from shoal.runtime.measuring.wholemodel import SLOW_READ_S, Built


def built(read_s):
    return Built(*[None] * len(Built._fields))._replace(
        data="place in the data: it", read_s=read_s
    )


def slow(*waits):
    for number, wait in enumerate(waits):
        time.sleep(wait)
        yield number


@pytest.mark.parametrize("waits", [(0.02,), (0.2, 0.02), (0.0, 0.02, 0.2)])
def test_the_first_batch_comes_with_the_time_of_reading_the_second_if_there_is_one(waits):
    batch, seconds = read_one(slow(*waits))
    assert batch == 0
    assert 0.02 <= seconds < 0.2


def test_who_waited_long_for_a_batch_waits_for_no_other_one(monkeypatch):
    monkeypatch.setattr(firstbatches, "LONG_READ_S", 0.01)
    assert read_one(slow(0.02, 10.0))[0] == 0


def failing():
    yield "a batch"
    raise OSError("the disk is gone")


def test_a_second_batch_that_fails_fails_no_plan():
    assert read_one(failing())[0] == "a batch"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ([1, 2, 3, 4, 5], [1, 2, 3, 4]),
        ([1, 2, 3, 4], [1, 2, 3]),  # the last one may be short
        ([1], [1]),
    ],
)
def test_of_several_batches_the_last_of_an_epoch_is_left_out(source, found):
    assert first_batches(source, 4) == found


def test_where_no_length_is_stated_the_last_one_read_may_be_the_last():
    assert first_batches(slow(0, 0), 4) == [0]
    assert first_batches(slow(0, 0, 0, 0, 0), 4) == [0, 1, 2]
    assert first_batches(slow(0), 1) == [0]


def test_a_later_batch_that_fails_fails_no_description():
    assert first_batches(failing(), 4) == ["a batch"]


def test_processes_that_read_ahead_are_not_timed():
    data = DataLoader(TensorDataset(torch.zeros(4, 1)), 2, num_workers=1)
    assert read_one(data)[1] == 0.0


@pytest.mark.parametrize(
    ("read_s", "step_s", "is_told"),
    [(SLOW_READ_S / 2, 0.001, False), (0.2, 0.001, True), (0.2, 0.5, False), (0.0, 0.0, False)],
)
def test_data_that_is_slow_beside_a_step_is_told(read_s, step_s, is_told):
    words = built(read_s).about_data(step_s)
    assert words.startswith("place in the data: it")
    assert ("devices wait for data" in words) == is_told
