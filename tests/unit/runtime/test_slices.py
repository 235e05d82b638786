"""Work is timed in slices, without the seconds in which others had the cores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.measuring.slices import in_slice, waited_s


class Machine:
    """Each piece of work runs for ``runs_s``, and waits for a core before for what is given."""

    def __init__(self, runs_s, waits_s=()):
        self.now = self.waited = 0.0
        self.runs_s, self.waits_s, self.count = runs_s, list(waits_s), 0

    def work(self):
        lost = self.waits_s.pop(0) if self.waits_s else 0.0
        self.now += lost + self.runs_s
        self.waited += lost
        self.count += 1

    def slice_of(self, until):
        return in_slice(self.work, until, waited=lambda: self.waited, clock=lambda: self.now)


def test_as_many_are_done_as_are_over_at_about_the_end():
    machine = Machine(10.0)
    assert machine.slice_of(until=42.0) == pytest.approx(10.0)
    assert machine.count == 4


def test_one_is_done_that_is_longer_than_the_slice():
    machine = Machine(10.0)
    assert machine.slice_of(until=1.0) == pytest.approx(10.0)
    assert machine.count == 1


def test_a_turn_that_another_process_had_is_not_counted():
    assert Machine(10.0, [0.0, 25.0]).slice_of(until=24.0) == pytest.approx(10.0)


@given(st.lists(st.floats(0, 50), max_size=8), st.floats(1, 20), st.floats(0, 200))
def test_whatever_others_take_the_work_is_as_long_as_it_is(waits_s, runs_s, until):
    assert Machine(runs_s, waits_s).slice_of(until) == pytest.approx(runs_s)


def test_threads_that_end_meanwhile_do_not_make_it_longer():
    machine = Machine(10.0)
    told = iter((7.0, 3.0))
    found = in_slice(machine.work, 1.0, waited=lambda: next(told), clock=lambda: machine.now)
    assert found == pytest.approx(10.0)


def test_the_first_one_is_not_counted_where_there_is_time_for_a_second():
    machine = Machine(10.0)
    cold = iter((8.0,))

    def work():
        machine.now += next(cold, 0.0)
        machine.work()

    assert in_slice(work, 50.0, clock=lambda: machine.now) == pytest.approx(10.0)
    assert machine.count == 4
    cold = iter((8.0,))
    machine.now = 0.0
    assert in_slice(work, 20.0, clock=lambda: machine.now) == pytest.approx(18.0)


def test_no_work_takes_less_than_was_computed():
    """Where one thread runs and fifteen others wait for the same core."""
    machine = Machine(10.0, [25.0])
    found = in_slice(
        machine.work,
        1.0,
        waited=lambda: 1.3 * machine.waited,
        computed=lambda: 10.0 * machine.count,
        clock=lambda: machine.now,
    )
    assert found == pytest.approx(10.0)


def test_what_is_under_way_belongs_to_the_slice():
    machine = Machine(10.0)

    def settle():
        machine.now += 4.0

    assert in_slice(machine.work, 1.0, settle=settle, clock=lambda: machine.now) == 14.0


def test_the_waits_of_all_threads_are_added(tmp_path):
    for thread, told in {
        "7": "900 1500000000 3",
        "8": "1 500000000 9",
        "9": "",
        "10": "x",
    }.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(told + "\n")
    (tmp_path / "11").mkdir()
    assert waited_s(tmp_path) == 2.0


def test_where_nobody_tells_it_is_nothing(tmp_path):
    assert waited_s(tmp_path / "none") == 0.0
