"""What waits on the host has its place before a step: all of it in one piece of memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.memory import store
from shoal.runtime.placing.waitingroom import ALIGNED, WaitingRoom

SIZES = st.lists(st.integers(1, 500), min_size=1, max_size=20)


@given(SIZES)
def test_places_lie_apart_aligned_and_in_the_room(sizes):
    room = WaitingRoom(dict(enumerate(sizes)), pin=False)
    places = [room.place(key, size) for key, size in enumerate(sizes)]
    for number, place in enumerate(places):
        place.fill_(number)
    assert all((place == number).all() for number, place in enumerate(places))
    assert all(place.storage_offset() % ALIGNED == 0 for place in places)
    assert not room._own
    again = [room.place(key, size) for key, size in enumerate(sizes)]
    assert [p.data_ptr() for p in again] == [p.data_ptr() for p in places]


@given(SIZES, st.integers(1, 2000))
def test_more_than_was_planned_has_memory_of_its_own(sizes, more):
    room = WaitingRoom(dict(enumerate(sizes)), pin=False)
    places = [room.place(key, size) for key, size in enumerate(sizes)]
    for number, place in enumerate(places):
        place.fill_(number)
    larger = room.place(0, sizes[0] + more)
    larger.fill_(99)
    assert len(larger) == sizes[0] + more
    assert larger.data_ptr() == room.place(0, sizes[0] + 1).data_ptr()
    assert all((place == number).all() for number, place in enumerate(places))
    room.close()


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20))
def test_batches_that_grow_to_what_was_measured_take_nothing_besides(sizes):
    room = WaitingRoom({"a": max(sizes), "b": max(sizes)}, pin=False)
    for size in sizes:
        room.place("a", size)
        room.place("b", size)
    assert not room._own


@pytest.fixture
def registered(monkeypatch):
    """Bytes that CUDA was told of, and forgot."""
    told = []
    monkeypatch.setattr(store, "_register", lambda flat: told.append(flat.numel()))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runtime = type("R", (), {"cudaHostUnregister": lambda self, at: told.append("gone")})()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return told


def test_cuda_is_told_once_before_any_place_is_asked_for(registered):
    room = WaitingRoom({"a": 640, "b": 320}, pin=True)
    assert registered == [960]
    for _ in range(3):
        room.place("a", 300)
        room.place("b", 300)
    assert registered == [960]
    room.place("a", 900)
    assert registered == [960, 900]
    room.close()
    assert registered == [960, 900, "gone", "gone"]


def test_nothing_is_taken_where_nothing_waits(registered):
    WaitingRoom({}, pin=True).close()
    assert registered == []
