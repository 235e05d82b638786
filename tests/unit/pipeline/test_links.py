"""Links between stages: what is left of them when a stage goes."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from shoal.partition.track import AllocationTracker
from shoal.pipeline import links as links_module
from shoal.pipeline.links import Links
from shoal.pipeline.packing import Packer
from shoal.pipeline.shared import MOST_SLOTS

PATIENCE_S = 10.0


def linked(came, **options):
    """Two stages' links to each other."""
    return [
        Links({other: sock}, Packer({}), came.set, torch.device("cpu"), **options)
        for other, sock in zip((1, 0), socket.socketpair(), strict=True)
    ]


@pytest.fixture
def ends():
    """Two stages' links to each other, and an event that is set when something came."""
    came = threading.Event()
    pair = linked(came)
    yield (*pair, came)
    for links in pair:
        links.cut()


def threads_of_links() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name in {"to-0", "to-1", "from-0", "from-1"}]


@pytest.mark.parametrize("way", ["close", "cut"])
def test_links_that_end_leave_no_thread(way, ends):
    first, second, came = ends
    first.send(1, 0, {"a": torch.arange(3)})
    assert came.wait(PATIENCE_S)
    assert second.has(0, 0)
    threads = threads_of_links()
    assert len(threads) == 4
    for links in (first, second):
        getattr(links, way)()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not threads_of_links()


def test_what_waits_to_be_sent_is_no_memory_of_the_device(ends):
    first, second, came = ends
    tensor = torch.arange(1000)
    with AllocationTracker() as tracker:
        first.send(1, 0, tensor)
    assert came.wait(PATIENCE_S)
    assert torch.equal(second.take(0, 0), tensor)
    assert tracker.peak_bytes == 0


LARGE = 2**16  # int64: above what goes over the socket


def taken(links, came, peer, count):
    """The next messages of kind 0."""
    found = []
    for _ in range(count):
        while not links.has(peer, 0):
            assert came.wait(PATIENCE_S)
            came.clear()
        found.append(links.take(peer, 0))
    return found


def known(ends):
    """After a first large frame, which goes over the socket beside a trial of the memory."""
    first, second, came = ends
    first.send(1, 0, torch.zeros(LARGE))
    taken(second, came, 0, 1)
    while not first._ends[1].shares:
        threading.Event().wait(0.005)
    return first._ends[1]


def test_frames_keep_their_order_whichever_way_they_go_and_reuse_memory(ends):
    first, second, came = ends
    end = known(ends)
    for number in range(30):
        sent = [torch.full((n,), number) for n in (LARGE, 3, 2 * LARGE)]
        for tensor in sent:
            first.send(1, 0, tensor)
        assert all(map(torch.equal, taken(second, came, 0, 3), sent))
    assert end.shares
    assert (
        len(end._slots._slots) <= MOST_SLOTS
    )  # of 60 frames: the word that one is free may be late
    assert len(second._ends[0]._windows) <= MOST_SLOTS + 1


def test_who_sends_more_than_is_taken_has_no_more_memory_for_it_than_stated(ends):
    first, second, came = ends
    end = known(ends)
    sent = [torch.full((LARGE,), number) for number in range(2 * MOST_SLOTS)]
    for tensor in sent:
        first.send(1, 0, tensor)
    assert len(end._slots._slots) == MOST_SLOTS  # the others go over the socket
    assert all(map(torch.equal, taken(second, came, 0, len(sent)), sent))


def test_memory_that_the_peer_does_not_see_is_not_used(monkeypatch):
    monkeypatch.setattr(links_module, "is_trial", lambda memory: False)
    came = threading.Event()
    warned = threading.Event()
    monkeypatch.setattr(links_module.warnings, "warn", lambda *words, **where: warned.set())
    first, second = linked(came)
    first.send(1, 0, torch.zeros(LARGE))
    taken(second, came, 0, 1)
    assert warned.wait(PATIENCE_S)
    assert not first._ends[1]._slots._slots
    for number in range(3):
        first.send(1, 0, torch.full((LARGE,), number))
    found = taken(second, came, 0, 3)
    assert [int(tensor[0]) for tensor in found] == [0, 1, 2]
    assert not first._ends[1].shares
    for links in (first, second):
        links.cut()


def test_what_a_lost_peer_sent_is_there(ends):
    first, second, came = ends
    known(ends)
    tensor = torch.arange(LARGE)
    first.send(1, 0, tensor)
    first.close()
    assert torch.equal(*taken(second, came, 0, 1), tensor)
    while not second.gone(0):
        assert came.wait(PATIENCE_S)
        came.clear()
