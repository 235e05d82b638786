"""To what widths the last trials go on: never to what takes longer."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from shoal.core.spec import WidthMeasure
from shoal.planner.lanes import Load, array_s, serial_s
from shoal.planner.narrower import Narrower, from_key, narrower, told

SECONDS = st.floats(0.001, 1.0)


def measured(width: int, step_s: float, alone_s: float, **more) -> WidthMeasure:
    return WidthMeasure(width=width, step_s=step_s, alone_s=alone_s, **more)


def load(trials: int = 64, devices: int = 2, **more) -> Load:
    steps = tuple(10 if n % 3 else 90 for n in range(trials))
    return Load(steps=steps, devices=devices, every=10, closes_ranks=True, **more)


@given(st.integers(1, 4), SECONDS, SECONDS, SECONDS)
@example(devices=1, wide_s=1.0, narrow_s=0.55, alone_s=0.1375)  # five: 1.0, 1.1, or 0.7 alone
def test_nobody_goes_on_more_slowly(devices, wide_s, narrow_s, alone_s):
    best, less = measured(16, wide_s, alone_s), measured(4, narrow_s, alone_s)
    found = narrower(best, [best, less], load(devices=devices), 0)
    assert list(found) == sorted(found, reverse=True)
    assert [most for _, most in found] == sorted((most for _, most in found), reverse=True)
    seconds = {16: wide_s, 4: narrow_s, 1: alone_s}
    for trials in range(1, 16 * devices + 1):
        each = math.ceil(trials / devices)
        width = min([w for w, most in found if trials <= most], default=16)
        if width < 16:
            took = math.ceil(each / width) * seconds[width]
            assert took < math.ceil(each / 16) * wide_s


def test_where_an_array_takes_as_long_however_wide_only_the_last_goes_alone():
    found = narrower(measured(16, 1.0, 0.9), [measured(4, 1.0, 0.9)], load(), 0)
    assert found == (Narrower(1, 2),)  # one on each device


def test_where_each_slot_costs_its_own_time_few_go_on_in_few():
    best, less = measured(16, 4.4, 1.0), measured(4, 1.6, 1.0)
    found = narrower(best, [best, less], load(), 0)
    assert found == (Narrower(4, 16), Narrower(1, 2))


def test_an_array_that_takes_long_to_make_is_not_made_for_the_last():
    best = measured(16, 4.4, 1.0)
    found = narrower(best, [measured(4, 1.6, 1.0, build_s=1e6)], load(), 0)
    assert found == (Narrower(1, 8),)


def test_what_a_key_tells_comes_back():
    widths = (Narrower(4, 9), Narrower(1, 2))
    assert told(16, widths) == "16, 4 for 9, 1 for 2"
    assert from_key({"array_widths": told(16, widths)}) == widths
    assert from_key({"array_widths": told(16, ())}) == ()
    assert from_key({}) == ()


@given(st.integers(1, 3), SECONDS, SECONDS)
def test_arrays_whose_ranks_close_take_no_longer_than_lanes_or_than_one_by_one(
    devices, wide_s, alone_s
):
    best = measured(16, wide_s, alone_s)
    closing = load(devices=devices)
    lanes = Load(steps=closing.steps, devices=devices, every=10)
    assert array_s(best, closing, 0) <= array_s(best, lanes, 0) * (1 + 1e-9)
    assert array_s(best, closing, 0) <= 2 * serial_s(best, closing, 0)
