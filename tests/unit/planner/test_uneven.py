"""What is said of arrays whose slots' batches are of several lengths."""

from __future__ import annotations

from shoal.core.spec import WidthMeasure
from shoal.planner.uneven import TO_DO, told_of_passes, with_lengths

WIDE = WidthMeasure(width=16, passes=7.25, lengths="[8, 17 to 40]")


def test_an_array_that_loses_by_its_lengths_says_so_and_what_to_do():
    narrow = WidthMeasure(width=4, passes=3.0, lengths="[8, 17 to 40]")
    why = with_lengths(
        ("unfused: arrays were measured and gain nothing", "more"), [narrow, WIDE], 1
    )
    assert why == (
        "unfused: arrays were measured and gain nothing: batches vary in length, [8, 17 to 40]: a "
        "step of 16 slots takes 7.2 passes, one for each length among their batches; to have "
        "fewer, pad batches to one length or to multiples of one, or give all trials one seed "
        "(`seed` in the space), with which they read their data in one order",
        "more",
    )


def test_an_array_that_is_taken_tells_its_own_passes():
    narrow = WidthMeasure(width=4, passes=3.0, lengths="[8, 17 to 40]")
    why = with_lengths(("as arrays of 4",), [narrow, WIDE], 4)
    assert why[0] == "as arrays of 4"
    assert "a step of 4 slots takes 3.0 passes" in why[1]


def test_slots_that_read_one_order_have_one_pass_and_need_no_advice():
    (line,) = told_of_passes([WidthMeasure(width=8, lengths="[8, 17 to 40]")], 8)
    assert line.endswith("those of all slots were of one length at each step that was timed")
    assert TO_DO not in line


def test_nothing_is_said_of_batches_of_one_length():
    assert told_of_passes([WidthMeasure(width=8)], 8) == ()
