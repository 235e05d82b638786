"""A float32 that was split is put together again to the bit, whatever it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.units import round_up
from shoal.memory import split
from shoal.memory.layout import WORD
from shoal.memory.split import joined, split_into

SPECIAL = (
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00008000, 0x00018000),
    *(0x00800000, 0x3F800000, 0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000),
    *(0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7F8000, 0xFF7FFFFF, 0x7F800000, 0xFF800000),
    *(0x7F800001, 0x7F807FFF, 0x7F808000, 0x7F80FFFF, 0x7F810000, 0x7F818000, 0x7F828000),
    *(0xFF800001, 0xFF807FFF, 0xFF808000, 0xFF80FFFF, 0xFF818000, 0x7FC00000, 0xFFC00000),
    *(0x7FBFFFFF, 0x7FC08000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF, 0xFFFF8000, 0xFFFFFFFF),
)
BITS = st.one_of(
    st.sampled_from(SPECIAL),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16 - 1).map(lambda high: (high << 16) + 0x8000),  # in the middle
)


def floats(bits):
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def parts_of(values):
    """Parts with what was there before."""
    bits = torch.full((round_up(-(-values.numel() // 8), WORD),), 255, dtype=torch.uint8)
    high = torch.full_like(values, float("nan"), dtype=torch.bfloat16)
    return high, torch.full_like(values, -1, dtype=torch.int16), bits


def assert_same_bits(first, second):
    kind = torch.int32 if first.dtype == torch.float32 else torch.int16
    assert torch.equal(first.view(kind), second.view(kind))


def check(values):
    """Split, compare with the cast, and put together again; the parts."""
    parts = parts_of(values)
    split_into(values, *parts)
    is_nan = values.isnan()
    assert torch.equal(parts[0].isnan(), is_nan)
    assert_same_bits(parts[0][~is_nan], values.bfloat16()[~is_nan])
    joined(*parts, out := torch.full_like(values, 7.0))
    assert_same_bits(out, values)
    return parts


@given(st.lists(BITS, max_size=200))
def test_any_floats_come_back_and_what_is_loaded_is_their_cast(bits):
    check(floats(bits))


def test_every_special_value_in_every_place_of_a_word():
    for value in SPECIAL:
        for at in range(65):
            bits = [0x3F812345] * 65
            bits[at] = value
            check(floats(bits))


@pytest.mark.full
def test_every_exponent_and_every_last_bits_of_a_high_half():
    lows = torch.arange(1 << 16)
    for high in range(0, 1 << 16, 113):  # an exponent is 128 of them
        check((lows + (high << 16)).to(torch.int32).view(torch.float32))


@pytest.mark.parametrize("of", ["ties", "odd neighbours", "NaNs", "the least NaNs"])
def test_tensors_of_nothing_else_than_what_is_rare(of, monkeypatch):
    monkeypatch.setattr(split, "_PIECE", 1 << 12)
    monkeypatch.setattr(split, "_MANY", 1 << 10)
    numbers = torch.arange(20_000)
    bits = {
        "ties": (0x3F80 + 2 * (numbers % 100) << 16) + 0x8000,
        "odd neighbours": (0x3F81 + 2 * (numbers % 100) << 16) + 0x8000,
        "NaNs": 0x7FFFFFFF - numbers,
        "the least NaNs": 0x7F800001 + numbers,
    }[of]
    _, _, ties = check(bits.to(torch.int32).view(torch.float32))
    if of == "ties":
        assert (ties[: 20_000 // 8] == 255).all()
    if of == "odd neighbours":
        assert not ties.any()


@given(st.integers(0, 5000), st.integers(0, 2**32 - 1))
def test_of_pieces_of_any_length(count, seed):
    random = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=random)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "_PIECE", 1 << 10)
        check(bits.to(torch.int32).view(torch.float32))


def test_a_channels_last_weight_is_split_as_it_lies():
    weight = torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last)
    parts = parts_of(weight)
    assert parts[0].stride() == weight.stride()
    split_into(weight, *parts)
    assert torch.equal(parts[0], weight.bfloat16())
    joined(*parts, out := torch.empty_like(weight))
    assert torch.equal(out, weight)


def test_of_random_weights_almost_none_is_in_the_middle():
    weights = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    _, _, ties = check(weights)
    assert 0 < int(sum((ties >> bit & 1).sum() for bit in range(8))) < 40
