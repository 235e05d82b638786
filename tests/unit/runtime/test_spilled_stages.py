"""A spilled stage at a stop, and what it says where something does not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shoal.core.errors import CapacityError
from shoal.runtime.interpret import Seat
from shoal.runtime.spilledstages import SpilledStage, SpilledStageSeat


class Event:
    """Work on a stream."""

    def __init__(self) -> None:
        self.done = False

    def wait(self) -> None:
        assert self.done


def seat_on(kind: str) -> tuple[Seat, Event, list[Event]]:
    """A seat with one copy in flight, and what its waker waits for."""
    seat, copy, woken_by = Seat.__new__(Seat), Event(), []
    host = SimpleNamespace(submit=lambda work, after: woken_by.extend(after))
    seat._lane, seat._waker = SimpleNamespace(host=host), None
    seat._in_flight = [(copy, ())]
    seat.device = SimpleNamespace(spec=SimpleNamespace(kind=kind), synchronize=lambda: None)
    return seat, copy, woken_by


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_others_compute_while_what_is_in_flight_comes_to_its_end(kind):
    seat, copy, woken_by = seat_on(kind)
    stage = SpilledStageSeat.__new__(SpilledStageSeat)
    stage._spilled, stage._calms = SimpleNamespace(seat=seat), False
    stage.device = seat.device
    script = stage._calm()
    ready = next(script)
    assert (ready(), stage.waits_here) == (False, True)
    assert woken_by == ([copy] if kind == "cuda" else [])  # a thread tells by itself
    copy.done = True
    assert ready()
    assert list(script) == []
    assert not seat._in_flight


def test_a_first_batch_that_does_not_fit_says_how_much_larger_it_is():
    stage, seat = SpilledStage.__new__(SpilledStage), SimpleNamespace()

    def refuse():
        raise CapacityError("no room")

    stage._session = SimpleNamespace(job=SimpleNamespace(held_bytes=1000))
    stage.seat = seat
    seat.counts, seat.trial, seat.peak_bytes, seat.unit_bytes = True, 3, 0, 1000
    seat.resident_bytes, seat.reserve_units = lambda: 1000, refuse
    seat.device = SimpleNamespace(spec=SimpleNamespace(name="cuda:0"))
    with pytest.raises(CapacityError, match="the first batch of trial 3 allocated") as caught:
        stage._count(lambda: torch.empty(3000, dtype=torch.uint8), "the first batch")
    assert 3 <= caught.value.growth <= 3.1
