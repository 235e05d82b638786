"""What is kept of reading a source that may keep anything: little, and enough."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.core.errors import TrialError
from shoal.data import Feed
from shoal.data.position import Moves
from shoal.data.trail import SEARCHES

CPU = torch.device("cpu")


class Source:
    """Draws with each batch, from the streams that are named."""

    def __init__(self, *streams: str, batches: int = 20) -> None:
        self.streams, self.batches = streams, batches

    def __iter__(self):
        for index in range(self.batches):
            if "torch" in self.streams:
                torch.rand(2)
            if "python" in self.streams:
                random.random()
            if "numpy" in self.streams:
                np.random.rand()
            yield torch.tensor([index])


def read(source, steps, training=lambda step: None):
    feed = Feed(source, CPU)
    for step in range(steps):
        feed.next()
        training(step)
    return feed.position().trail


def count_kept(trail) -> int:
    """Numbers kept of the epochs, a state counting for all that it has."""
    return sum(
        3 * len(moves.runs) + 600 * len(moves.states)
        for epoch in trail.epochs
        for moves in epoch.moves.values()
    )


def test_a_stream_that_only_the_source_draws_from_costs_nothing():
    trail = read(Source("torch", "python", "numpy"), 100)

    assert len(trail.epochs) == 5
    assert count_kept(trail) == 0


def test_a_source_that_draws_nothing_costs_a_move_an_epoch():
    """Making an iterator may look at a stream, so it finds each as it was."""
    trail = read(Source(), 100, training=lambda step: torch.rand(1000))

    assert trail.epochs[1].moves == {"torch": Moves(((-1, 1, 21000),))}


def test_training_that_draws_the_same_each_step_is_one_run_an_epoch():
    trail = read(Source("torch"), 100, training=lambda step: torch.rand(1000))

    runs = trail.epochs[0].moves["torch"].runs
    assert runs == ((1, 19, 1000),)
    assert count_kept(trail) <= 3 * 3 * len(trail.epochs)


def test_training_that_draws_differently_each_step_is_a_run_a_batch():
    trail = read(Source("torch"), 100, training=lambda step: torch.rand(step))

    assert count_kept(trail) <= 3 * 100


def test_states_are_kept_where_no_number_leads_and_are_not_looked_for_for_ever(monkeypatch):
    looked = []
    between = "shoal.data.trail.numbers_between"
    monkeypatch.setattr(between, lambda *states: looked.append(states))

    trail = read(Source("torch"), 21, training=torch.manual_seed)

    states = trail.epochs[0].moves["torch"].states
    assert len(states) == 19
    assert all(isinstance(state, Tensor) for state in states.values())
    assert len(looked) == SEARCHES


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (8, "the data source ended after 8 batches of an epoch of which the trial had read 20"),
        (21, "the data source yielded more than the 20 batches that an epoch had when the trial"),
    ],
)
def test_a_source_that_yields_otherwise_the_second_time_is_refused(batches, message):
    feed = Feed(Source(), CPU)
    for _ in range(23):
        feed.next()

    with pytest.raises(TrialError, match=message):
        Feed(Source(batches=batches), CPU).seek(feed.position())
