"""Seats of trials that go on at rungs: what is on record stays, whatever comes later."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from shoal.core.plan import ArrayPlace, ArrayRoom, LoneNeed, seated, seated_at
from shoal.core.seats import ALONE, Epoch, epochs_of
from shoal.execution.seating import Seating
from shoal.execution.trial import TrialRun
from shoal.search import Search
from shoal.search.rules import Halving
from shoal.testing import make_job

EVERY, LAST, WIDTH = 4, 9, 2


def job_of(trial: int):
    need = LoneNeed(held_bytes=1, unit_bytes=1, peak_bytes=2, step_s=1.0)
    sizes = {"held_bytes": 2, "unit_bytes": 2, "peak_bytes": 4, "step_s": 0.5}
    room = ArrayRoom(group="gx2", width=WIDTH, kind="eager", **sizes)
    slot = trial % WIDTH
    place = ArrayPlace(
        group="gx2", slot=slot, width=WIDTH, alone=need, rooms=(room,), alone_most=1
    )
    key = {
        "array": f"slot {slot} of {WIDTH}",
        "array_company": "gx2",
        "array_widths": "2, 1 for 1",
    }
    return replace(make_job(trial), array=place, numerics=key)


def left(job, step):
    """The job of a trial that left its array for good."""
    return seated(job, (*epochs_of(job.numerics), Epoch(step, 0, ALONE, for_good=True)))


class Study:
    """A search and its trials as a run sees them, without devices."""

    def __init__(self, trials: int, size: int, keys=None, gone=()) -> None:
        self.search = Search(size, Halving("min"))
        self.told = []
        self.floor = SimpleNamespace(states={}, tell_replanned=self._replanned)
        self.keys = keys or {}
        self.grow(trials, gone)
        self.seating = Seating(self.search, self.floor, self.keys)

    def _replanned(self, job, step, reason) -> None:
        self.told.append(SimpleNamespace(trial=job.trial, step=step))

    def grow(self, to: int, gone=()) -> None:
        for trial in range(len(self.search._facts), to):
            self.search.enroll(trial, {"x": trial})
            self.search.ends_at(trial, LAST, every=EVERY)
            if trial not in gone:
                self.floor.states[trial] = TrialRun(job=job_of(trial), layout=None, total=36)

    def come_to(self, rung: int, trials) -> None:
        for trial in trials:
            self.search.report(trial, rung * EVERY, trial / 100)
            if trial in self.floor.states:
                self.floor.states[trial].step = rung * EVERY
        self.search.decide()

    def take(self, trial: int):
        self.seating.take(self.floor.states[trial], EVERY)
        return str(self.floor.states[trial].job.numerics["array"])

    def fall_back(self, trial: int, step: int = 0) -> None:
        state = self.floor.states[trial]
        state.step, state.job = step, seated_at(state.job, step)


def test_a_seat_that_a_trial_had_it_has_again_though_others_came():
    study = Study(6, size=6)
    study.come_to(1, range(6))
    first = [study.take(trial) for trial in (0, 1)]
    study.fall_back(1)
    assert study.floor.states[1].job.numerics["array"] == "slot 1 of 2"
    study.grow(24)  # four generations side by side
    study.come_to(1, range(24))
    study.floor.states[1].step = EVERY
    assert study.take(1) == first[1]
    assert len(study.told) == len({(event.trial, event.step) for event in study.told})


def test_whoever_trained_on_after_a_rung_keeps_the_seat_that_it_had():
    study = Study(6, size=6)
    study.come_to(1, range(6))
    study.search.report(0, 2 * EVERY, 0.0)  # on record of an earlier run, without a new seat
    study.floor.states[0].seats = epochs_of(study.floor.states[0].job.numerics)
    assert study.take(0) == "slot 0 of 2"
    assert not study.told


@pytest.mark.parametrize("restarted", [False, True])
def test_a_trial_that_left_its_array_counts_as_before(restarted):
    study = Study(12, size=6)
    study.come_to(1, range(6))
    if restarted:  # an earlier run's trials are known by their keys alone
        keys = {t: job_of(t).numerics for t in range(6)}
        keys[1] = left(job_of(1), 6).numerics
        study = Study(12, size=6, keys=keys, gone=range(6))
        study.come_to(1, range(6))
    else:
        study.floor.states[1].job = left(study.floor.states[1].job, 6)
    study.come_to(1, range(6, 12))
    going = [t for t in range(12) if study.search.goes_on_after(t, 1)]
    ranks = {t: study.seating._ranks.after(t, 1) for t in going if t >= 6}
    assert [rank.place for rank in ranks.values()] == [going.index(t) for t in ranks]


def test_a_trial_that_left_its_array_for_good_gets_no_other_seat():
    study = Study(6, size=6)
    study.come_to(1, range(6))
    study.come_to(3, range(2))
    state = study.floor.states[0]
    assert study.take(0) == "slot 0 of 2; from step 12 alone"
    state.job = left(job_of(0), 3)
    state.seats = epochs_of(state.job.numerics)
    assert study.take(0) == "slot 0 of 2; for good from step 3 alone"
    assert study.seating.next_rung(state, EVERY, None) is None


def test_a_trial_stops_where_it_is_to_leave_its_array():
    state = TrialRun(job=job_of(1), layout=None, total=36, halt=8)
    seats = (*epochs_of(state.job.numerics), Epoch(5, 0, ALONE, for_good=True))
    assert (state.leaves_at, state.steps_left, state.before_halt(20)) == (None, 8, 8)
    state.seats = seats
    assert (state.leaves_at, state.steps_left, state.before_halt(20)) == (5, 5, 5)
    assert not state.leaves_now
    state.step = 5
    assert state.leaves_now
    state.job = seated(state.job, seats)
    assert (state.leaves_at, state.steps_left, state.leaves_now) == (None, 3, False)


def test_a_trial_that_fails_after_its_rung_is_the_same_in_the_next_run():
    study = Study(6, size=6)
    study.come_to(1, range(6))
    assert not study.search.goes_on_after(5, 1)
    study.search.end(5, "failed")
    again = Study(6, size=6)
    for trial in range(6):
        again.search.report(trial, EVERY, trial / 100)
    again.search.end(5, "failed")
    again.search.decide()
    assert not again.search.goes_on_after(5, 1)
