"""Emulated time: what is due when, what is repaid, and what is lost and counted."""

import pytest

from shoal.core.turns import Upload
from shoal.device.pace import (
    MAX_DEBT_S,
    NEVER,
    PATIENCE_S,
    Fidelity,
    Mark,
    Pace,
    Resource,
    SystemClock,
    Wire,
    trouble,
)
from shoal.testing import ManualClock


class LateClock(ManualClock):
    """Every sleep takes 5 ms too long, as with another Python thread at work."""

    def sleep(self, seconds: float) -> None:
        self.advance(seconds + 0.005)


def _end(pace: Pace, due: float, *, seconds: float = 0.1, elapsed_s: float = 0.0) -> Mark:
    return pace.end("compute", due, seconds=seconds, elapsed_s=elapsed_s)


def test_what_is_first_begins_now() -> None:
    pace = Pace(ManualClock(7.0))

    assert pace.begin((NEVER,)) == 7.0
    assert pace.begin(()) == 7.0


def test_work_begins_when_the_latest_of_what_it_waited_for_was_due() -> None:
    pace = Pace(ManualClock(7.0))

    assert pace.begin((Mark(6.90, 6.995), Mark(6.93, 6.94))) == 6.93


def test_idle_time_is_not_repaid() -> None:
    pace = Pace(ManualClock(7.0))

    assert pace.begin((Mark(6.0, 7.0 - PATIENCE_S - 0.001),)) == 7.0


def test_a_thread_sleeps_until_its_work_is_due() -> None:
    clock = ManualClock(1.0)

    mark = _end(Pace(clock), 1.5)

    assert clock.now() == 1.5
    assert mark == Mark(1.5, 1.5)


def test_sleeps_that_take_too_long_do_not_add_up() -> None:
    clock = LateClock()
    pace = Pace(clock)

    mark = NEVER
    for _ in range(20):
        mark = _end(pace, pace.begin((mark,)) + 0.1)

    assert mark.due == pytest.approx(2.0)
    assert clock.now() == pytest.approx(2.005)
    assert pace.fidelity()["compute"].behind_s == 0


def test_work_that_was_late_once_is_made_up_for() -> None:
    clock = ManualClock()
    pace = Pace(clock)

    clock.advance(0.15)  # the real work; the profile says 0.1
    mark = _end(pace, 0.1, elapsed_s=0.15)
    assert pace.fidelity()["compute"].behind_s == pytest.approx(0.05)
    mark = _end(pace, pace.begin((mark,)) + 0.1)

    assert (mark.due, clock.now()) == (pytest.approx(0.2), pytest.approx(0.2))
    kept = pace.fidelity()["compute"]
    assert kept.behind_s == 0
    assert (kept.overruns, kept.overrun_s) == (1, pytest.approx(0.05))


def test_a_machine_that_is_always_too_slow_falls_behind_by_what_it_took_longer() -> None:
    clock = ManualClock()
    pace = Pace(clock)

    mark = NEVER
    for _ in range(50):
        begin = pace.begin((mark,))
        clock.advance(0.12)
        mark = _end(pace, begin + 0.1, elapsed_s=0.12)

    kept = pace.fidelity()["compute"]
    assert kept.behind_s == pytest.approx(50 * 0.02)
    assert kept.emulated_s == pytest.approx(5.0)
    assert clock.now() - mark.due == pytest.approx(MAX_DEBT_S)
    assert "fell behind by 1.0 s over 5.0 s of emulated time" in kept.describe("compute")
    assert "larger scale" in trouble(pace.fidelity())


def test_a_run_that_kept_up_is_no_trouble() -> None:
    fidelity = {"compute": Fidelity(works=3, emulated_s=10.0, behind_s=0.1)}

    assert trouble(fidelity) == ""
    assert trouble(fidelity, tolerance=0.001) != ""
    assert Fidelity().describe("up") == "up: nothing was emulated"


def test_a_warm_up_can_be_forgotten() -> None:
    pace = Pace(ManualClock())
    _end(pace, 0.1)

    pace.forget()

    assert pace.fidelity() == {}


def test_work_of_no_given_time_takes_its_own() -> None:
    clock = ManualClock(3.0)

    assert Pace(clock).free(2.9, 0.5) == Mark(3.4, 3.0)


def test_a_resource_serves_one_request_after_another() -> None:
    resource = Resource()

    assert resource.take(1.0, 0.5) == 1.5
    assert resource.take(1.2, 0.5) == 2.0
    assert resource.take(5.0, 0.5) == 5.5


def test_a_wire_carries_one_copy_at_a_time_and_knows_when_it_was_busy() -> None:
    wire = Wire()
    assert not wire.is_busy(1.0)

    with wire.carry(1.0) as begin:
        assert begin == 1.0
        assert wire.is_busy(1.0)
        assert wire.is_busy(9.0)  # nobody knows yet when it will be over
        wire.leave(2.0)
    with wire.carry(1.5) as begin:
        assert begin == 2.0
        wire.leave(2.5)

    busy = [wire.is_busy(at) for at in (0.9, 1.0, 1.9, 2.4, 2.5)]
    assert busy == [False, True, True, True, False]


def test_a_copy_that_fails_frees_the_wire() -> None:
    wire = Wire()

    with pytest.raises(RuntimeError), wire.carry(1.0):
        raise RuntimeError
    with wire.carry(0.5) as begin:
        assert begin == 1.0


def test_what_passes_goes_at_once_and_the_copy_that_it_passes_is_over_later() -> None:
    wire = Wire()

    with wire.carry(1.0, Upload(0, 5)):
        assert wire.pass_by(1.5, 0.25, Upload(1, 9)) == (1.5, 1.75)
        # Who passes does not pass who passes.
        assert wire.pass_by(1.6, 0.25, Upload(0, 4)) == (1.75, 2.0)
        assert wire.pass_by(1.6, 0.25, Upload(0, 6)) is None  # it is needed later
        assert not wire.leave(2.0)
        assert wire.passed() == 0.5
        assert wire.leave(2.5)
        assert wire.pass_by(2.5, 0.25, Upload(1, 9)) is None
    with wire.carry(2.0) as begin:
        assert begin == 2.5
        assert wire.pass_by(2.5, 0.25, Upload(1, 9)) is None  # nobody may
        assert wire.leave(3.0)


def test_a_copy_that_fails_leaves_nothing_of_what_passed_it() -> None:
    wire = Wire()

    def fail() -> None:
        with wire.carry(1.0, Upload(0, 5)):
            wire.pass_by(1.0, 0.5, Upload(1, 1))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert wire.pass_by(1.0, 0.5, Upload(1, 1)) is None
    with wire.carry(3.0):
        assert wire.leave(4.0)


def test_the_system_s_clock_runs_and_sleeps() -> None:
    clock = SystemClock()

    begin = clock.now()
    clock.sleep(0.001)

    assert clock.now() - begin >= 0.001
