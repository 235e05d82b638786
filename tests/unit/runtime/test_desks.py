"""How urgent the host steps of arrays and stages are, as other threads ask."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shoal.core.seams import Candidate
from shoal.runtime.desks import Desks


class Desk:
    """Who is at one kind of desk."""

    def __init__(self, candidates, trials):
        self.candidates, self.trials = candidates, trials

    def __len__(self):
        return len(self.trials)


@pytest.fixture
def desks():
    found = Desks.__new__(Desks)
    found.arrays = Desk({3: SimpleNamespace(seated={3: None, 5: None})}, [3, 5])
    found.stages = Desk([7], [7])
    found._urgent = {}
    return found


def candidate(trial, left_s):
    return Candidate(trial=trial, ticket=1, remaining_s=left_s, warm=False, step_s=1.0)


def test_every_trial_of_an_array_stands_for_it(desks):
    desks.note_turn(candidate(3, 8.0))
    assert desks.urgency(5) == candidate(5, 8.0)
    assert desks.urgency(3) == candidate(3, 8.0)
    assert desks.urgency(7) is None


def test_a_stage_is_as_urgent_as_when_it_last_computed(desks):
    desks.note_turn(candidate(7, 8.0))
    desks.note_turn(candidate(7, 7.0))
    desks.note_turn(candidate(1, 9.0))  # of a trial that is alone on its seat
    assert desks.urgency(7) == candidate(7, 7.0)
    assert desks.urgency(1) is None


def test_nothing_is_known_of_who_has_left(desks):
    desks.note_turn(candidate(7, 8.0))
    desks.stages = Desk([], [])
    desks.note_turn(candidate(3, 8.0))
    assert desks.urgency(7) is None
