"""An array is never chosen that ends later than its trials one by one, or does not fit."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.spec import ArrayMeasure, WidthMeasure
from shoal.core.units import Bytes, Seconds
from shoal.planner.width import MOST, WORTH, choose_width, widths_to_try, words_for

SECONDS = st.floats(1e-6, 10.0)


@st.composite
def measures(draw):
    widths = draw(st.lists(st.integers(2, MOST), unique=True, max_size=7))
    return ArrayMeasure(
        alone_s=Seconds(draw(SECONDS)),
        widths=tuple(
            WidthMeasure(
                width=width,
                step_s=Seconds(draw(SECONDS)),
                unit_bytes=Bytes(draw(st.integers(0, 1000))),
            )
            for width in widths
        ),
    )


@given(measures(), st.integers(1, 300), st.integers(1, 8), st.integers(0, 1000))
def test_what_is_chosen_gains_fits_and_is_the_best(measure, trials, devices, room):
    def fits(found):
        return found.unit_bytes <= room

    width, why = choose_width(measure, trials, devices, fits)

    each = math.ceil(trials / devices)
    limit = WORTH * each * measure.alone_s
    takes = {w.width: math.ceil(each / w.width) * w.step_s for w in measure.widths if fits(w)}
    assert why
    if width == 1:
        assert why.startswith("unfused: ")
        assert all(seconds > limit for seconds in takes.values())
    else:
        assert takes[width] <= limit
        assert takes[width] == min(takes.values())
        assert words_for(measure, width) == why


@given(st.integers(1, 10_000), st.integers(1, 64))
def test_the_widths_that_are_tried_rise_to_all_trials_of_a_device(trials, devices):
    widths = widths_to_try(trials, devices)
    each = min(MOST, math.ceil(trials / devices))
    assert list(widths) == sorted(set(widths))
    assert all(2 <= width <= each for width in widths)
    assert (widths[-1] == each) if each > 1 else (widths == ())


def test_what_was_declined_is_said():
    assert choose_width(ArrayMeasure(declined="it is odd"), 4, 1, lambda _: True) == (
        *(1, "unfused: it is odd"),
    )
