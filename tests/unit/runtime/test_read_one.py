"""How long the first batch took to read, and when a plan says so."""

import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shoal.runtime.describe import read_one
from shoal.runtime.wholemodel import SLOW_READ_S, Built


def built(read_s):
    return Built(*[None] * len(Built._fields))._replace(
        data="place in the data: it", read_s=read_s
    )


def slow():
    time.sleep(0.02)
    yield "a batch"


def test_the_first_batch_comes_with_the_time_of_reading_it():
    batch, seconds = read_one(slow())
    assert batch == "a batch"
    assert seconds >= 0.02


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
