"""Random streams come back as they were, by whichever way NumPy's is read and set."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.rng import capture_rng, restore_rng, same_rng, seed_all

DRAWS = {
    "uniform": np.random.random,
    "normal": np.random.standard_normal,  # draws two, and keeps one of them
    "many": lambda: np.random.random(1000),
    "seed": lambda: np.random.seed(3),
    "nothing": lambda: None,
    "there and back": lambda: np.random.set_state(np.random.get_state()),
}
STEPS = st.lists(st.tuples(st.sampled_from(sorted(DRAWS)), st.integers(0, 2)), max_size=30)


def same_numpy(one: Any, other: Any) -> bool:
    return one[0] == other[0] and np.array_equal(one[1], other[1]) and one[2:] == other[2:]


@given(STEPS)
def test_numpy_s_stream_is_read_and_set_as_its_own_calls_do(steps: list[tuple[str, int]]) -> None:
    outer = np.random.get_state()
    try:
        trials = [np.random.RandomState(seed).get_state() for seed in range(3)]
        kept = []
        for seed in range(3):
            seed_all(seed)
            kept.append(capture_rng())
        for what, trial in steps:
            restore_rng(kept[trial])
            assert same_numpy(np.random.get_state(), trials[trial])
            DRAWS[what]()
            trials[trial] = np.random.get_state()
            kept[trial] = capture_rng()
            assert same_numpy(kept[trial].numpy, trials[trial])
    finally:
        np.random.set_state(outer)


def test_a_global_generator_of_another_kind_is_kept_too() -> None:
    seed_all(1)
    usual, before = np.random.get_bit_generator(), capture_rng()
    try:
        np.random.set_bit_generator(np.random.MT19937(7))  # other words in another place
        other = capture_rng()
        drawn = np.random.random(3)
        restore_rng(before)
        restore_rng(other)
        assert np.array_equal(np.random.random(3), drawn)
    finally:
        np.random.set_bit_generator(usual)
    restore_rng(before)
    assert same_rng(capture_rng(), before)


def test_all_streams_go_on_from_where_they_were() -> None:
    seed_all(5)
    before = capture_rng()
    drawn = random.random(), np.random.random()
    assert not same_rng(capture_rng(), before)
    restore_rng(before)
    assert (random.random(), np.random.random()) == drawn
