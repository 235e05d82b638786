"""Where a pipeline whose steps overlap runs empty."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.pipeline.stops import HORIZON, MOST_S, Stops, steps_together

quick = settings(max_examples=60, deadline=None)
COUNTS = st.integers(1, 60)
STEP_S = st.floats(0.01, 20.0)


@quick
@given(STEP_S, st.integers(1, 400), st.none() | COUNTS, st.none() | COUNTS)
def test_every_evaluation_and_end_of_an_epoch_is_a_stop_and_none_is_long_in_coming(
    step_s, steps, every, epoch
):
    runs = list(Stops(steps=steps, eval_every=every)._runs(step_s, epoch))
    ends = set(accumulate(runs))
    assert sum(runs) == steps
    assert max(runs) <= max(1, round(MOST_S / step_s))
    assert ends >= set(range(every or steps, steps + 1, every or steps))
    assert ends >= set(range(epoch or steps, steps + 1, epoch or steps))


@quick
@given(STEP_S, st.none() | COUNTS, st.none() | COUNTS)
def test_a_step_has_one_stop_at_most_and_fewer_where_it_is_short(step_s, every, epoch):
    stops = Stops(steps=300, eval_every=every)
    assert 0 < stops.per_step(step_s, epoch) <= 1
    assert stops.per_step(10 * step_s, epoch) >= stops.per_step(step_s, epoch)


def test_what_is_saved_after_each_step_stops_there():
    assert Stops(steps=100, each_step=True).per_step(0.1, None) == 1.0


def test_a_lease_is_topped_up_before_it_ends():
    runs = list(Stops(steps=10_000)._runs(1.0, None))
    assert set(runs[:-1]) == {6, 8}  # six where the answer to a last step is not here yet
    assert sum(runs) >= HORIZON


def test_a_short_training_does_not_stop_more_often_than_a_long_one():
    """A lease that gets shorter towards the end would have each two steps stop."""
    assert len(list(Stops(steps=30)._runs(1.5, None))) <= 7


@pytest.mark.parametrize(
    ("limits", "steps"),
    [({}, 8), ({"left": 5}, 5), ({"lease_left": 3}, 3), ({"eval_every": 4}, 2), ({"left": 0}, 1)],
)
def test_the_nearest_stop_ends_a_program(limits, steps):
    assert steps_together(2, 1.0, **({"left": None} | limits)) == steps


def test_epochs_are_as_many_steps_as_they_have():
    assert sum(Stops(epochs=3)._runs(1.0, 7)) == 21
