"""Links between stages: what is left of them when a stage goes."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from shoal.partition.track import AllocationTracker
from shoal.pipeline.links import Links
from shoal.pipeline.packing import Packer

PATIENCE_S = 10.0


@pytest.fixture
def ends():
    """Two stages' links to each other, and an event that is set when something came."""
    came = threading.Event()
    pair = [
        Links({other: sock}, Packer({}), came.set, torch.device("cpu"))
        for other, sock in zip((1, 0), socket.socketpair(), strict=True)
    ]
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
    assert tracker.allocated_bytes == 0
