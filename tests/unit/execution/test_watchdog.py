"""Which workers hang, and how long a dead one waits."""

from __future__ import annotations

import queue as queue_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.execution.watchdog import Backoff, Watchdog, place_of, words_of_hang

SECONDS = st.floats(0.001, 1000.0)


@pytest.fixture
def dog():
    dog = Watchdog(least_s=60.0, factor=10.0, first_s=1800.0)
    dog.look("cpu:0", 0, 0.0, leased=True)
    return dog


def test_a_count_that_stands_still_for_longer_than_the_limit_is_a_hang(dog):
    dog.step("cpu:0", 0.1)
    assert dog.look("cpu:0", 0, 60.0, leased=True) is None
    assert dog.look("cpu:0", 0, 61.0, leased=True) == 61.0


def test_a_count_that_moves_starts_the_clock_anew(dog):
    dog.step("cpu:0", 0.1)
    assert dog.look("cpu:0", 1, 59.0, leased=True) is None
    assert dog.look("cpu:0", 1, 118.0, leased=True) is None
    assert dog.look("cpu:0", 1, 120.0, leased=True) == 61.0


def test_a_worker_without_a_lease_is_not_watched(dog):
    dog.step("cpu:0", 0.1)
    assert dog.look("cpu:0", 0, 1e6, leased=False) is None
    assert dog.look("cpu:0", 0, 1e6 + 59, leased=True) is None


def test_before_its_first_step_a_worker_has_half_an_hour(dog):
    assert dog.look("cpu:0", 0, 1799.0, leased=True) is None
    assert dog.look("cpu:0", 0, 1801.0, leased=True) == 1801.0


def test_a_worker_that_builds_another_model_has_as_long_as_for_the_first(dog):
    dog.step("cpu:0", 0.1)
    assert dog.look("cpu:0", 0, 1799.0, leased=True, patient=True) is None
    assert dog.look("cpu:0", 0, 1801.0, leased=True, patient=True) == 1801.0


def test_a_long_step_makes_the_limit_longer(dog):
    dog.step("cpu:0", 20.0)
    assert dog.limit_s("cpu:0") == 200.0
    assert dog.look("cpu:0", 0, 199.0, leased=True) is None


def test_one_long_step_in_a_thousand_does_not_make_the_limit_longer(dog):
    for seconds in [*[1.0] * 999, 500.0]:
        dog.step("cpu:0", seconds)
    assert dog.limit_s("cpu:0") == 60.0


def test_a_new_worker_starts_from_nothing(dog):
    dog.step("cpu:0", 0.1)
    dog.forget("cpu:0")
    assert dog.look("cpu:0", 0, 1700.0, leased=True) is None
    assert dog.limit_s("cpu:0") == 1800.0


def test_a_limit_below_the_least_is_not_believed():
    assert Watchdog(least_s=60.0, first_s=1.0).limit_s("cpu:0") == 60.0


@given(steps=st.lists(SECONDS, min_size=1, max_size=300), still_s=SECONDS)
def test_a_hang_is_a_stand_beyond_ten_long_steps_and_a_minute(steps, still_s):
    dog = Watchdog(least_s=60.0, factor=10.0, first_s=1800.0)
    dog.look("cpu:0", 7, 0.0, leased=True)
    for seconds in steps:
        dog.step("cpu:0", seconds)
    found = dog.look("cpu:0", 7, still_s, leased=True)
    assert dog.limit_s("cpu:0") >= 60.0
    assert dog.limit_s("cpu:0") <= max(60.0, 10 * max(steps))
    assert (found is not None) == (still_s > dog.limit_s("cpu:0"))


STACKS = """Thread 0x00007f0000000001 (most recent call first):
  File "/lib/threading.py", line 320 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/home/ada/my models/gpt.py", line 12 in build
  File "/home/ada/study.py", line 40 in <module>
"""


def test_anything_that_changes_is_work(dog):
    dog.step("cpu:0", 0.1)
    assert dog.look("cpu:0", (0, {3}), 59.0, leased=True) is None
    assert dog.look("cpu:0", (0, {4}), 118.0, leased=True) is None
    assert dog.look("cpu:0", (0, {4}), 179.0, leased=True) == 61.0


def test_the_words_of_a_hang_end_with_how_long_and_where():
    words = words_of_hang(1801.2, 1800.0, STACKS)
    assert words.startswith("its threads stood at:\n" + STACKS.strip())
    assert words.splitlines()[-1] == (
        "it got nothing done for 1801 s, at /home/ada/my models/gpt.py:12 in build; "
        "1800 s are allowed"
    )


def test_of_a_hang_in_a_library_the_line_that_called_it_is_told_too():
    queue = queue_module.__file__
    stacks = (
        f'Thread 0x01 (most recent call first):\n  File "{queue}", line 171 in get\n'
        '  File "/home/ada/words.py", line 7 in __iter__\n'
    )
    assert place_of(stacks) == f"{queue}:171 in get, called from /home/ada/words.py:7 in __iter__"


# -- told of ----------------------------------------------------------------------------------


def test_a_standstill_is_told_of_long_before_it_counts_as_a_hang_and_ever_less_often(dog):
    told = []
    for now in range(1, 400):
        dog.look("cpu:0", 0, float(now), leased=True)
        if (still_s := dog.to_tell("cpu:0", float(now))) is not None:
            told.append(still_s)
    assert told == [21.0, 43.0, 87.0, 175.0, 351.0]


def test_what_moves_again_is_told_of_anew(dog):
    assert dog.to_tell("cpu:0", 21.0) == 21.0
    dog.look("cpu:0", 1, 22.0, leased=True)
    assert dog.to_tell("cpu:0", 42.0) is None
    assert dog.to_tell("cpu:0", 43.0) == 21.0


def test_nothing_is_told_of_steps_that_always_take_long_nor_of_who_is_not_watched(dog):
    dog.step("cpu:0", 30.0)
    assert dog.to_tell("cpu:0", 299.0) is None
    assert dog.to_tell("cpu:0", 301.0) == 301.0
    assert dog.to_tell("cpu:1", 301.0) is None


def test_a_stopped_process_stands_nowhere():
    assert place_of("(no answer)") == ""
    assert words_of_hang(61.0, 60.0, "(no answer)") == (
        "its threads stood at:\n(no answer)\nit got nothing done for 61 s; 60 s are allowed"
    )


# -- back-off ---------------------------------------------------------------------------------


def test_the_first_death_waits_for_nothing_and_each_next_one_twice_as_long():
    backoff = Backoff(first_s=1.0, most_s=60.0, calm_s=300.0)
    waits = [backoff.died("cpu:0", now=float(now)) for now in range(9)]
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_a_worker_that_lived_for_long_starts_the_count_anew():
    backoff = Backoff(calm_s=300.0)
    backoff.died("cpu:0", 0.0)
    assert backoff.died("cpu:0", 301.0) == 0.0
    assert backoff.died("cpu:0", 302.0) == 1.0


def test_devices_wait_for_themselves():
    backoff = Backoff()
    backoff.died("cpu:0", 0.0)
    assert backoff.died("cpu:1", 0.0) == 0.0


@given(st.lists(st.floats(0.0, 1e4), max_size=50))
def test_a_wait_is_never_longer_than_the_most(times):
    backoff = Backoff(first_s=1.0, most_s=60.0)
    assert all(0.0 <= backoff.died("cpu:0", now) <= 60.0 for now in sorted(times))
