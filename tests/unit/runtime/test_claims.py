"""By what a step on the host is ranked: by how its trial was when the step was submitted."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from shoal.core.seams import Candidate
from shoal.device.streams import Piece, Turn
from shoal.device.virtual import VirtualDevice
from shoal.program.ir import Action, Op
from shoal.runtime.interpret import Seat
from shoal.runtime.loop import DeviceLoop
from shoal.scheduler.interleave import Interleaver
from shoal.testing import make_device


class Stepping(Seat):
    """A seat of which only steps on the host are asked."""

    def __init__(self, device, trial, done):
        self.device, self.trial, self._lane = device, trial, device.lane()
        self._closing, self._in_flight, self._written = threading.Event(), [], {}
        self._grads_written, self._synced = {0: device.lane().host.submit(lambda: None)}, None
        self.note_host = lambda trial: None
        self.compute = SimpleNamespace(host_step=lambda _: [(lambda: done.append(trial), 1.0)])

    def _seconds(self, action):
        return None

    def _note(self, stream, event, size=0):
        pass


def of(trial, left_s):
    return Candidate(trial=trial, ticket=trial, remaining_s=left_s, warm=False, step_s=1.0)


@pytest.fixture
def device():
    found = VirtualDevice(make_device())
    found.host_turns._free = 1
    return found


def test_a_trial_that_has_begun_its_next_step_meanwhile_does_not_lose_its_rank(device):
    turns, left_s, done = device.host_turns, {1: 3.0, 2: 2.0}, []
    turns.claim = lambda trial: of(trial, left_s[trial])
    turns.choose = Interleaver().first
    first, second = (Stepping(device, trial, done) for trial in (1, 2))
    gate = threading.Event()
    held = device.lane().host.submit_pieces([Piece(gate.wait)], turn=Turn(turns, of(0, 9.0)))
    while turns._free:
        time.sleep(1e-3)
    events = [seat._host_step(Action(Op.STEP, 0)) for seat in (second, first)]
    left_s[1] = 0.0  # all that it had left is issued
    while len(turns._waiting) < 2:
        time.sleep(1e-3)
    gate.set()
    for event in [held, *events]:
        event.wait()
    assert done == [1, 2]


def a_loop(**attributes):
    loop = DeviceLoop.__new__(DeviceLoop)
    vars(loop).update(attributes)
    return loop


def test_a_trial_claims_what_it_has_left_and_the_age_of_its_step():
    interleaver = Interleaver()
    interleaver.started(4, 7)
    interleaver.started(5, 1)
    session = SimpleNamespace(steps_left=3, job=SimpleNamespace(step_s=2.0))
    stay = SimpleNamespace(seat=SimpleNamespace(trial=5, session=session))
    loop = a_loop(_stays={5: stay}, _interleaver=interleaver, _current=5, _turn=of(4, 1.0))
    expected = Candidate(trial=5, ticket=1, remaining_s=6.0, warm=False, step_s=2.0)
    assert loop._claim(5) == expected


def test_an_array_claims_what_it_had_in_the_turn_in_which_it_submits():
    loop = a_loop(_stays={}, _turn=of(3, 8.0))
    assert loop._claim(6) == of(3, 8.0)  # the trial that its slots began with has left it
