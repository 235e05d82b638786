"""A device's many short units in a row are told as one, and nothing of their time is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.wire.actionrows import SHORT_S, ActionRows, Row

STREAMS = ("compute", "up", "down", "host")


def told(actions: list[Row], fine: int) -> list[Row]:
    rows = ActionRows(fine)
    return [row for action in actions for row in rows.add(action)] + rows.rest()


def unit(number: int, *, trial: int = 0, stream: str = "compute", seconds: float = 0.001) -> Row:
    start = 10.0 + number * 2 * SHORT_S
    return Row(stream, trial, number, "B s0 m0", start, start + seconds, 3)


def test_units_in_a_row_are_one_row_as_long_as_all_of_them() -> None:
    (row,) = told([unit(number) for number in range(5)], fine=0)
    assert row[:4] == ("compute", 0, 0, "5 units")
    assert (row.start, row.num_bytes) == (10.0, 15)
    assert row.end - row.start == pytest.approx(0.005)


def test_the_first_actions_are_told_one_by_one() -> None:
    rows = told([unit(number) for number in range(6)], fine=3)
    assert [row.action for row in rows] == ["B s0 m0"] * 3 + ["3 units"]


def test_other_trials_long_units_and_copies_are_told_by_themselves() -> None:
    actions = [
        unit(0),
        unit(1, trial=1),
        unit(2, trial=1, seconds=SHORT_S),
        unit(3, trial=1),
        unit(4, trial=1, stream="up"),
    ]
    assert told(actions, fine=0) == actions


@given(
    st.lists(
        st.tuples(st.sampled_from(STREAMS), st.integers(0, 2), st.sampled_from([0.001, 0.01])),
        max_size=60,
    ),
    st.integers(0, 10),
)
def test_each_trial_s_seconds_and_bytes_on_each_stream_add_up(
    drawn: list[tuple[str, int, float]], fine: int
) -> None:
    actions = [
        unit(at, trial=trial, stream=stream, seconds=seconds)
        for at, (stream, trial, seconds) in enumerate(drawn)
    ]
    rows = told(actions, fine)
    for stream in STREAMS:
        for trial in range(3):
            mine = [[r for r in some if r[:2] == (stream, trial)] for some in (actions, rows)]
            before, after = (sum(row.end - row.start for row in some) for some in mine)
            assert after == pytest.approx(before)
            assert sum(r.num_bytes for r in mine[0]) == sum(r.num_bytes for r in mine[1])
    starts = [row.start for row in rows]
    assert starts == sorted(starts)
    assert all(one.end <= other.start for one, other in itertools.pairwise(rows))
