"""Bytes as people write and read them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.units import format_bytes, format_enough, parse_bytes


@given(st.integers(0, 2**44))
def test_who_gives_as_much_as_is_told_gives_enough(size):
    told = parse_bytes(format_enough(size).replace(" ", "")) if size else 0
    assert size <= told <= max(size, 1.1 * size)


def test_it_is_rounded_up_where_a_reader_gets_the_nearest():
    assert (format_bytes(102_405), format_enough(102_405)) == ("100.0 KiB", "100.1 KiB")
    assert format_enough(102_400) == "100.0 KiB"
    assert format_enough(1023) == "1023 B"
    assert format_enough(2**20 - 1) == "1.0 MiB"
