"""A spilled stage at a stop, and what is said where something does not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shoal.core.errors import CapacityError
from shoal.runtime.beside import counted
from shoal.runtime.gangs.spilledstages import SpilledStageSeat
from shoal.runtime.interpret import Seat
from shoal.runtime.seats.stay import Stay


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


def full_seat() -> SimpleNamespace:
    """A seat that holds 1000 bytes and has room for 1000 more."""

    def refuse():
        raise CapacityError("no room")

    return SimpleNamespace(
        session=SimpleNamespace(job=SimpleNamespace(held_bytes=1000, array=None)),
        **{"counts": True, "track": True, "trial": 3, "peak_bytes": 0, "unit_bytes": 1000},
        resident_bytes=lambda: 1000,
        reserve_units=refuse,
        device=SimpleNamespace(spec=SimpleNamespace(name="cuda:0")),
    )


def test_a_first_batch_that_does_not_fit_says_how_much_larger_it_is():
    with pytest.raises(CapacityError, match="the first batch of trial 3 allocated") as caught:
        counted(full_seat(), lambda: torch.empty(3000, dtype=torch.uint8), "the first batch")
    assert 3 <= caught.value.growth <= 3.1


def test_what_is_drawn_ahead_is_counted_in_the_steps_whose_units_are():
    seat = full_seat()
    Stay(seat, iter(()))
    seat.session.counted(lambda: torch.empty(900, dtype=torch.uint8), "drawing ahead")
    assert seat.peak_bytes == 1900
    with pytest.raises(CapacityError, match="drawing ahead of trial 3 allocated"):
        seat.session.counted(lambda: torch.empty(3000, dtype=torch.uint8), "drawing ahead")
    seat.track, seat.peak_bytes = False, 0
    seat.session.counted(lambda: torch.empty(3000, dtype=torch.uint8), "drawing ahead")
    assert seat.peak_bytes == 0
