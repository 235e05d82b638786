"""A seat that has nothing to issue is no seat that could go on: its device sleeps meanwhile."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from shoal.device.virtual import VirtualDevice
from shoal.program.ir import Action, Op, Part
from shoal.runtime.gangs.spilledstages import SpilledStageSeat
from shoal.runtime.interpret import Seat
from shoal.testing import make_device


class Waiting(Seat):
    """A seat of a device such as CUDA, where submitting a copy would wait for the host's work."""

    _may_block = True
    waits_for_compute = False

    def __init__(self, device, head, needs=()):
        self.device, self._lane, self._head, self.needs = device, device.lane(), head, list(needs)
        self._written, self._waker = dict(enumerate(needs)), None

    @property
    def head(self):
        return self._head

    def _needs(self):
        return self.needs

    def _issue(self):
        self._head = None


class Copied:
    """A copy of CUDA: who waits for it is told, and nobody else."""

    error, startable = None, True

    def __init__(self):
        self._over = threading.Event()

    @property
    def done(self):
        return self._over.is_set()

    def end(self):
        self._over.set()

    def wait(self):
        self._over.wait()


@pytest.fixture
def device():
    return VirtualDevice(make_device())


def may_go_on(seat):
    return SpilledStageSeat._may_go_on(SimpleNamespace(stage=1, _here=SimpleNamespace(seat=seat)))


def turns_until(seat):
    """How often the device's loop looks at the seat until it may go on."""
    turns, device = 0, seat.device
    while not may_go_on(seat):
        turns, seen = turns + 1, device.version
        with device.progress:
            if device.version == seen and not may_go_on(seat):
                assert device.progress.wait(timeout=20.0), "nobody woke the device"
    return turns


def test_a_stage_that_waits_for_a_load_sleeps_until_the_host_has_stepped(device):
    gate = threading.Event()
    stepped = device.lane().host.submit(gate.wait)
    seat = Waiting(device, Action(Op.LOAD, 1, parts=(Part.PARAM,)), [stepped])
    seat.issue_copies()
    assert seat.head is not None
    assert not may_go_on(seat)  # to say that it may would be a busy loop
    threading.Timer(0.5, gate.set).start()
    begin = time.process_time()
    assert turns_until(seat) <= 3
    assert time.process_time() - begin < 0.25  # of half a second
    seat.issue_copies()
    assert seat.head is None


def test_the_device_is_woken_when_the_copies_are_over_that_a_word_waits_for(device):
    copied = Copied()
    seat = Waiting(device, Action(Op.SEND, 1, version=1, parts=(Part.PARAM,), peer=1), [copied])
    seat.issue_copies()
    seat.issue_copies()  # asked again, it has nobody wait twice
    assert not may_go_on(seat)
    threading.Timer(0.2, copied.end).start()
    assert turns_until(seat) <= 3
    seat.issue_copies()
    assert seat.head is None
