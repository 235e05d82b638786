"""Trials of an array that are a few steps apart are evaluated together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shoal.core.errors import CapacityError
from shoal.runtime.arrays.seat import STEP_BATCHES, ArraySeat
from shoal.runtime.session import Session


class Seat(ArraySeat):
    """Trials that are evaluated after ``every`` steps, with ``valid`` batches each time."""

    def __init__(self, steps, every, valid, as_one=True):
        self.as_one = as_one
        self.steps, self.every, self.seated = dict(enumerate(steps)), every, {}
        self.valid, self._held, self.rounds = valid, 0, []
        self._has_evaluated = self._spills = False
        feed = SimpleNamespace(num_batches=valid)
        for trial in self.steps:
            settings = SimpleNamespace(eval_every=every)
            session = SimpleNamespace(
                job=SimpleNamespace(trial=trial), settings=settings, valid_feed=feed
            )
            self.seated[trial] = SimpleNamespace(
                session=session, slot=trial, trial=trial, task=None, leaving=False, left=0
            )

    def _evaluates_as_one(self, evaluating):
        return self.as_one

    def _guard(self, trial, work):
        work()

    def _next(self, seated):
        step = self.steps[seated.trial]
        seated.session.step = step
        seated.session.steps_to_evaluation = Session.steps_to_evaluation.fget(seated.session)
        evaluates = step and step % self.every == 0 and seated.left != -step
        if evaluates:
            seated.left = seated.left or self.valid
        seated.task = SimpleNamespace(kind="evaluation" if evaluates else "step")

    def _evaluate(self, evaluating):
        self.rounds.append({seated.trial for seated in evaluating})
        for seated in evaluating:
            seated.task, seated.left = None, seated.left - 1
            if not seated.left:
                seated.left = -self.steps[seated.trial]

    def _train(self, training):
        self.rounds.append(None)
        for seated in training:
            seated.task, seated.left = None, 0
            self.steps[seated.trial] += 1


def run(steps, *, every=10, valid=12, rounds=80, as_one=True):
    seat = Seat(steps, every, valid, as_one)
    for _ in range(rounds):
        seat.round()
    return seat


def test_those_a_few_steps_behind_are_waited_for_and_all_are_in_step_from_then_on():
    seat = run([2, 1, 0])
    assert seat.steps[0] == seat.steps[1] == seat.steps[2]
    assert {0, 1, 2} in seat.rounds
    assert all(found in (None, {0, 1, 2}) for found in seat.rounds)


def test_nobody_waits_where_slots_are_evaluated_one_after_the_other():
    seat = run([2, 1, 0], as_one=False)
    assert seat.rounds[:9] == [None] * 8 + [{0}]
    assert {0, 1, 2} not in seat.rounds


def test_a_chain_of_trials_does_not_lengthen_the_wait():
    seat = run([27, 18, 9, 0], every=30, valid=30, rounds=60)
    evaluated = [at for at, found in enumerate(seat.rounds) if found and 0 in found]
    assert evaluated[29] - 30 <= 3 + 30 // STEP_BATCHES  # its last batch: no other wait between


@pytest.mark.parametrize("behind", [6, 9])
def test_nobody_waits_for_more_steps_than_an_evaluation_is_worth(behind):
    seat = run([behind, 0])
    assert {0} in seat.rounds
    assert behind > 12 // STEP_BATCHES


def test_one_is_not_held_for_good_by_trials_that_are_always_near():
    seat = run([1, 0], every=3, valid=30)
    assert seat.steps[0] > 3


class Outgrown(Seat):
    """Its step takes 4 KiB, of a device that has no more than was planned."""

    unit_bytes, held_bytes, peak_bytes = 1024, 0, 0
    place, _array, _largest, _track = SimpleNamespace(kind="eager"), None, {}, False
    _device = SimpleNamespace(spec=SimpleNamespace(name="cpu:0"))

    def _computed(self, work, what, some):
        return torch.ones(1024)

    def _state_among(self, tracker):
        return 0

    def _room(self):
        raise CapacityError("cannot reserve 4.0 KiB on cpu:0 for 'the running unit'")


def test_a_step_that_has_no_room_says_what_it_took_and_what_was_planned():
    words = (
        r"^a step of an array of 2 allocated 4\.0 KiB on cpu:0, 1\.0 KiB were reserved for "
        r"it, and there is no room for the rest.*the largest.*Cannot reserve"
    )
    seat = Outgrown([0, 0], every=1, valid=1)
    with pytest.raises(CapacityError, match=words):
        seat._counted(lambda: None, [[torch.ones(3)] * 2], "training", list(seat.seated.values()))


def test_of_a_trial_that_is_dismissed_nothing_is_copied():
    """It may have failed as there was no memory, which its error holds still."""
    seat, asked = Seat([0, 0], every=1, valid=1), []
    for seated in seat.seated.values():
        seated.is_out = False
        seated.session.leave, seated.session.region = list, SimpleNamespace(rest=list)
    seat._array = SimpleNamespace(retire=lambda slot, whole: asked.append((slot, whole)))
    seat.dismiss(1)
    assert asked == [(1, False)]
    assert list(seat.seated) == [0]
