"""How many numbers lie between two states, and states as a checkpoint keeps them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.streams import (
    DeviceStream,
    NumpyStream,
    PythonStream,
    TorchStream,
    global_streams,
    numbers_between,
    skip,
    stream_of,
)

GENERATORS = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "python": random.Random,
    "numpy": np.random.RandomState,
}
DRAWS = {
    "torch": [
        lambda g: torch.rand(17, generator=g),
        lambda g: torch.randn(64, generator=g),
        lambda g: torch.randperm(9, generator=g),
        lambda g: torch.bernoulli(torch.full((2000,), 0.5), generator=g),
    ],
    "python": [lambda g: g.random(), lambda g: g.shuffle([1, 2, 3]), lambda g: g.getrandbits(99)],
    "numpy": [lambda g: g.rand(5), lambda g: g.permutation(7), lambda g: g.randint(9, size=700)],
}


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(GENERATORS)), st.integers(0, 2**31), st.data())
def test_what_any_code_draws_is_a_count_of_numbers(kind, seed, data):
    generator = GENERATORS[kind](seed)
    stream = stream_of(generator)
    for _ in range(data.draw(st.integers(0, 3))):
        data.draw(st.sampled_from(DRAWS[kind]))(generator)
    before = stream.get()
    for _ in range(data.draw(st.integers(1, 5))):
        data.draw(st.sampled_from(DRAWS[kind]))(generator)
    after = stream.get()

    count = numbers_between(stream, before, after)

    stream.set(before)
    skip(stream, count)
    assert stream.same(stream.get(), after)


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("count", [1, 255, 256, 257, 624, 100_000])
def test_a_count_is_found_whatever_piece_it_ends_in(kind, count):
    stream = stream_of(GENERATORS[kind](1))
    before = stream.get()
    skip(stream, count)

    assert numbers_between(stream, before, stream.get()) == count


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_stream_that_was_seeded_anew_is_reached_by_no_count(kind, monkeypatch):
    monkeypatch.setattr("shoal.data.streams.FARTHEST", 10_000)
    stream, other = stream_of(GENERATORS[kind](1)), stream_of(GENERATORS[kind](2))

    assert numbers_between(stream, stream.get(), other.get()) is None


@pytest.mark.parametrize(
    ("stream", "draw"),
    [
        (TorchStream(torch.Generator()), lambda s: torch.randn(3, generator=s._generator)),
        (PythonStream(random.Random(1)), lambda s: s._generator.gauss()),
        (NumpyStream(np.random.RandomState(1)), lambda s: s._generator.randn()),
    ],
)
def test_half_a_pair_of_normal_numbers_is_reached_by_no_count(stream, draw):
    before = stream.get()
    draw(stream)

    assert numbers_between(stream, before, stream.get()) is None


@pytest.mark.parametrize(
    "generator",
    [
        torch.Generator().manual_seed(1),
        random.Random(1),
        np.random.RandomState(1),
        np.random.default_rng(1),
        np.random.Generator(np.random.MT19937(1)),
        np.random.Generator(np.random.Philox(1)),
        np.random.Generator(np.random.SFC64(1)),
    ],
    ids=lambda value: type(getattr(value, "bit_generator", value)).__name__,
)
def test_a_packed_state_is_put_back(generator):
    stream = stream_of(generator)
    packed = stream.pack(stream.get())
    drawn = draw_five(generator)

    stream.set(stream.unpack(packed))

    assert draw_five(generator) == drawn


def draw_five(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(5, generator=generator).tolist()
    return [generator.random() for _ in range(5)]


def test_the_global_streams_are_the_ones_that_everybody_draws_from():
    streams = global_streams(torch.device("cpu"))
    states = {name: stream.get() for name, stream in streams.items()}
    drawn = (torch.rand(1), random.random(), np.random.rand())

    for name, stream in streams.items():
        stream.set(states[name])

    assert drawn == (torch.rand(1), random.random(), np.random.rand())


def test_what_is_no_generator_has_no_stream():
    assert stream_of("random") is None


def test_a_device_is_not_counted_and_its_state_is_put_back():
    generator = torch.Generator().manual_seed(1)  # stands for a GPU's
    stream = DeviceStream(generator.get_state, generator.set_state)
    state = stream.pack(stream.get())
    drawn = torch.rand(3, generator=generator)

    assert numbers_between(stream, state, stream.get()) is None
    stream.set(stream.unpack(state))
    assert torch.equal(torch.rand(3, generator=generator), drawn)
