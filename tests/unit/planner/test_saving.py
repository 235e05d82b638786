"""How often trials are saved, by what the disk bears."""

from __future__ import annotations

import pytest

from shoal.core.units import Bytes, Seconds
from shoal.planner.saving import DiskSpeed, Interval, States, interval

MB, GB = 10**6, 10**9
USUAL = Seconds(300.0)
STATES = States(together=Bytes(8 * GB), largest=Bytes(2 * GB), trials=4)


def decide(
    speed: float, every_s: float = USUAL, *, expected: float | None = None, is_named: bool = False
) -> Interval:
    disk = DiskSpeed(place="runs/a", bytes_per_s=speed, expected_bytes_per_s=expected)
    return interval(STATES, disk, Seconds(every_s), is_named=is_named, share=1 / 33)


@pytest.mark.parametrize("is_named", [True, False])
def test_of_a_disk_that_is_fast_enough_nothing_is_said(is_named):
    assert decide(2 * GB, is_named=is_named) == Interval(every_s=USUAL)
    assert decide(2 * GB, expected=3 * GB, is_named=is_named) == Interval(every_s=USUAL)
    assert decide(8 * GB / 75, is_named=is_named).why == ""  # a quarter of five minutes


def test_a_slow_disk_makes_the_interval_longer_and_the_plan_says_by_what():
    found = decide(20 * MB)

    assert found.every_s == 1600  # of which 400 s are a quarter
    for words in (
        "the disk of runs/a writes 19.1 MiB/s, measured just now:",
        "the 4 trials that train at a time, 7.5 GiB, takes 6m 40s",
        "more than 25% of the usual 5m 00s",
        "first saved after 26m 40s",
        "the largest from then on about every 55m 00s",  # 33 times 100 s
        "checkpoint_every=",
    ):
        assert words in found.why


def test_an_interval_that_was_named_stays_and_the_plan_says_what_it_costs():
    found = decide(20 * MB, 60.0, is_named=True)

    assert found.every_s == 60
    assert (
        "checkpoint_every=60 (1m 00s) stays, as it was named, of which that is 667%" in found.why
    )
    assert "about every 55m 00s" in found.why
    assert "checkpoint_every=1600 is borne" in found.why


def test_what_is_saved_at_each_step_stays_so_and_costs_what_the_plan_says():
    found = decide(20 * MB, 0.0, is_named=True)

    assert found.every_s == 0
    assert "when all of them step, they wait 6m 40s for the disk" in found.why
    assert decide(20 * GB, 0.0, is_named=True).why == ""  # less than a second


def test_a_disk_far_slower_than_it_was_measured_is_spoken_of():
    found = decide(200 * MB, expected=2 * GB)

    assert found.every_s == USUAL
    assert "190.7 MiB/s, measured just now, far less than 1.9 GiB/s expected" in found.why
    assert "takes 40.0 s; that is little enough: nothing is changed" in found.why


def test_what_was_expected_is_named_beside_a_correction():
    found = decide(20 * MB, expected=2 * GB)

    assert found.every_s == 1600
    assert "far less than 1.9 GiB/s expected (`shoal bench`)" in found.why
    assert "with 25.0 MiB/s" not in found.why
    assert "with 23.8 MiB/s expected" in decide(20 * MB, expected=25 * MB).why
