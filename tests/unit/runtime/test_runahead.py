"""How far ahead of a GPU units of several trials are submitted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shoal.core.seams import Candidate
from shoal.runtime import runahead
from shoal.runtime.runahead import LEAD_S, PAUSES_S, UNITS, RunAhead


class Event:
    def __init__(self):
        self.done = False

    def wait(self):
        self.done = True


class Gpu:
    """Its compute stream, unit by unit."""

    def __init__(self, kind="cuda"):
        self.spec = SimpleNamespace(kind=kind)
        self.events = []

    def so_far(self):
        self.events.append(Event())
        return self.events[-1]


def candidates(*trials):
    return {
        trial: Candidate(trial=trial, ticket=0, remaining_s=1.0, warm=False) for trial in trials
    }


def stays(**ready):
    return {
        int(trial[1:]): SimpleNamespace(
            seat=SimpleNamespace(is_ready=lambda at_once=at_once: at_once)
        )
        for trial, at_once in ready.items()
    }


@pytest.fixture
def pauses(monkeypatch):
    found = []
    monkeypatch.setattr(runahead.time, "sleep", found.append)
    return found


def test_units_are_submitted_until_the_gpu_has_enough_to_do():
    gpu = Gpu()
    ahead = RunAhead(gpu)
    for _ in range(UNITS):
        assert not ahead.waited()
        ahead.submitted(LEAD_S)
    assert ahead.waited()
    assert [event.done for event in gpu.events] == [True, *[False] * (UNITS - 1)]
    assert not ahead.waited()  # one is over


def test_of_small_units_as_many_as_take_so_long():
    gpu = Gpu()
    ahead = RunAhead(gpu)
    for _ in range(10):
        assert not ahead.waited()
        ahead.submitted(LEAD_S / 10)
    assert ahead.waited()


def test_a_unit_that_would_wait_lets_others_go_first(pauses):
    gpu = Gpu()
    ahead = RunAhead(gpu)
    ahead.submitted(LEAD_S)

    found = ahead.ready(candidates(0, 1, 2), stays(t0=False, t1=True, t2=False))

    assert list(found) == [1]
    assert not pauses


def test_where_all_would_wait_nobody_goes_while_the_gpu_computes(pauses):
    gpu = Gpu()
    ahead = RunAhead(gpu)
    ahead.submitted(LEAD_S)
    both, waiting = candidates(0, 1), stays(t0=False, t1=False)

    for _ in range(10):
        assert ahead.ready(both, waiting) == {}
    assert pauses == sorted(pauses)  # longer and longer, since copies may be slow
    assert (pauses[0], pauses[-1]) == PAUSES_S
    ahead.submitted(LEAD_S)
    assert ahead.ready(both, waiting) == {}
    assert pauses[-1] == PAUSES_S[0]
    gpu.events[1].done = True
    gpu.events[0].done = True
    assert ahead.ready(both, waiting) == both  # it is idle: on the GPU one waits no longer


def test_arrays_and_stages_are_ready_as_they_say(pauses):
    ahead = RunAhead(Gpu())
    assert list(ahead.ready(candidates(0, 7), stays(t0=False))) == [7]


def test_another_device_has_none():
    device = Gpu(kind="cpu")
    ahead = RunAhead(device)
    for _ in range(5):
        ahead.submitted(1.0)
        assert not ahead.waited()
    assert not device.events
    both = candidates(0, 1)
    assert ahead.ready(both, stays(t0=False, t1=False)) is both
