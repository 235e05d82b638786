"""Epochs of a trial's seats: what a numerics key tells comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.core.plan import ArrayPlace, ArrayRoom, LoneNeed, seated, seated_at
from shoal.core.seats import (
    ALONE,
    Epoch,
    base_of,
    epochs_of,
    is_continued,
    longer,
    rebased,
    told,
    until,
    with_epoch,
)
from shoal.core.technique import Spilled
from shoal.testing import make_job

WIDTHS = (4, 2, ALONE)


@st.composite
def histories(draw):
    steps = sorted(draw(st.sets(st.integers(1, 50), max_size=4)))
    seats = []
    for step in [0, *steps]:
        width = draw(st.sampled_from(WIDTHS if step else WIDTHS[:1]))
        seats.append(Epoch(step, draw(st.integers(0, width - 1)), width))
    if draw(st.booleans()):
        seats.append(Epoch(max(steps, default=0) + 5, 0, ALONE, for_good=True))
    return tuple(seats)


def make(width: int = 4):
    need = LoneNeed(held_bytes=10, unit_bytes=5, peak_bytes=15, step_s=1.0)
    rooms = tuple(
        ArrayRoom(
            group=f"gx{w}",
            width=w,
            kind="eager",
            held_bytes=10 * w,
            unit_bytes=5 * w,
            peak_bytes=15 * w,
            step_s=1 / w,
            most=None if w == width else w,
        )
        for w in WIDTHS
        if w > 1
    )
    place = ArrayPlace(group=f"gx{width}", slot=3, width=width, alone=need, rooms=rooms)
    job = make_job(0)
    key = {"array": f"slot 3 of {width}", "array_group": "g", "torch": "2"}
    sizes = {"held_bytes": 10 * width, "unit_bytes": 5 * width, "peak_bytes": 15 * width}
    return replace(job, array=place, numerics=key, step_s=1 / width, **sizes)


@given(histories())
def test_what_a_key_tells_comes_back(history):
    assert epochs_of({"array": told(history)}) == history


@pytest.mark.parametrize("words", ["", "none since step 3", "slot 3", "slot x of 4", "alone; "])
def test_other_words_tell_of_no_epochs(words):
    assert epochs_of({"array": words}) == ()


@given(histories(), st.integers(0, 60), st.integers(0, 60), st.integers(0, 1))
def test_what_is_asked_for_holds_from_where_the_trial_goes_on(history, asked_at, step, slot):
    seat = Epoch(asked_at, slot, 2, asked=asked_at > 0)
    asked = with_epoch(until(history, asked_at), seat)
    assume(seat in asked)  # and not the one that it has already
    assert epochs_of({"array": told(asked)}) == asked
    there = rebased(asked, step)
    assert [epoch.step for epoch in there] == sorted({epoch.step for epoch in there})
    if step >= asked_at:
        assert there == asked
        return
    assert until(there, step) == there
    assert there[-1][1:3] == asked[-1][1:3]
    assert until(there, step - 1) == until(history, step - 1)


def test_the_seat_that_others_follow_from():
    first, rung = Epoch(0, 3, 16), Epoch(120, 0, 4)
    wish = Epoch(130, 1, 8, asked=True)
    assert base_of((first, rung)) == first
    assert base_of((first, rung, wish, Epoch(360, 0, ALONE))) == wish
    words = "slot 3 of 16; from step 120 slot 0 of 4; as asked from step 130 slot 1 of 8"
    assert told((first, rung, wish)) == words
    assert epochs_of({"array": words}) == (first, rung, wish)


def test_words():
    history = (Epoch(0, 3, 16), Epoch(120, 0, 4), Epoch(360, 0, ALONE))
    assert told(history) == "slot 3 of 16; from step 120 slot 0 of 4; from step 360 alone"
    left = (Epoch(0, 3, 16), Epoch(7, 0, ALONE, for_good=True))
    assert told(left) == "slot 3 of 16; for good from step 7 alone"
    assert told([Epoch(0, 0, ALONE, for_good=True)]) == "alone"


def test_a_job_in_shards_that_leaves_its_array_is_in_others_and_goes_back_to_them():
    job = make()
    alone, shards = Spilled(optimizer="host"), (replace(job.shards[0], owned_bytes=7),)
    need = replace(job.array.alone, technique=alone, shards=shards)
    place = replace(job.array, alone=need, rooms=())
    job = replace(
        job, array=place, technique=Spilled(shards=1, keep=(0,)), waiting_bytes=3, host_bytes=90
    )
    left = seated(job, (Epoch(0, 3, 4), Epoch(7, 0, ALONE, for_good=True)))
    assert (left.array, left.technique, left.shards) == (None, alone, shards)
    assert (left.waiting_bytes, left.host_bytes, left.held_bytes) == (0, 87, 10)
    back = seated_at(left, 6)
    assert replace(back, array=place) == job


@given(histories(), st.integers(0, 60))
def test_a_job_follows_its_epochs_and_goes_back(history, step):
    job = make()
    history = (Epoch(0, 3, 4), *history[1:])
    late = seated(job, history)
    assert epochs_of(late.numerics) == history
    back = seated_at(late, step)
    there = until(history, step)
    assert epochs_of(back.numerics) == there
    assert back == seated(job, there)
    assert seated_at(late, 0) == job
    if there[-1].width == ALONE:
        assert back.array is None
        assert back.held_bytes == 10
    else:
        assert (back.array.slot, back.array.width) == there[-1][1:3]
        assert back.peak_bytes == back.held_bytes + back.unit_bytes == 15 * back.array.width


@given(histories(), st.integers(1, 60), st.integers(0, 3))
def test_a_new_epoch_is_told_once_and_only_if_something_changes(history, step, slot):
    new = Epoch(step, slot, 4)
    once = with_epoch(history, new)
    assert with_epoch(once, new) == once
    assert until(once, step)[-1][1:3] == new[1:3]
    assert len({epoch.step for epoch in once}) == len(once)


@given(histories(), st.integers(0, 60))
def test_a_beginning_is_a_beginning(history, step):
    assert is_continued(told(until(history, step)), told(history))
    assert not is_continued("slot 3 of 4", "slot 3 of 48")
    assert not is_continued("slot 3 of 4; from step 2 alone", "slot 3 of 4")


def test_of_two_keys_the_one_that_tells_more():
    short, long = {"array": "slot 3 of 4"}, {"array": "slot 3 of 4; from step 2 alone"}
    assert longer(short, long) is longer(long, short) is long
    assert longer(short, {"array": "slot 2 of 4; from step 2 alone"}) is short
    assert longer(short, {}) is short
    assert longer({}, short) == {}
