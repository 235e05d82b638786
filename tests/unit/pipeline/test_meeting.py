"""Device memory goes by itself where a check says that it arrives; else by the host, with why."""

from __future__ import annotations

import functools
import threading
import time

import pytest
import torch

from shoal.core.errors import WorkerError
from shoal.pipeline import direct, meeting
from shoal.pipeline.direct import Direct
from shoal.pipeline.meeting import Met, _Seat, _unfit, device_of, met, pairs_of
from shoal.pipeline.packing import Packer
from shoal.pipeline.post import Line, Post
from shoal.pipeline.schedule import Pipeline
from shoal.program.ir import Op

CPU = torch.device("cpu")


class Flipping(Direct):
    """One bit of what comes is another."""

    def receive(self, num_bytes, peer, kind):
        frame = super().receive(num_bytes, peer, kind)
        frame[-1] ^= 1
        return frame


class Silent(Direct):
    """Never sends."""

    def send(self, frame, peer, kind):
        threading.Event().wait()


class Raising(Direct):
    """Cannot be made."""

    def __init__(self, *args):
        raise RuntimeError("no way between the devices")


class Connecting(Direct):
    """Posting a half returns when the other side posts its own, as a pair's first ones do."""

    def _post_send(self, frame, peer):
        self._say(peer, 300)
        self._hear(peer, 301)
        return super()._post_send(frame, peer)

    def _post_receive(self, frame, peer):
        self._hear(peer, 300)
        self._say(peer, 301)
        return super()._post_receive(frame, peer)


def meet(place, broken, rank):
    """A message each way, with a carrier that is broken at one rank."""
    whole, meeting.Direct = meeting.Direct, broken if place.rank == rank else Direct
    try:
        with met(None, CPU, [(0, 1)], True, limit_s=1) as found:
            return found.carried, greet(place, found)
    finally:
        meeting.Direct = whole


def greet(place, found: Met):
    peer = 1 - place.rank
    lines = {Line(op, peer, 0): 1 for op in (Op.SEND, Op.RECV)}
    with Post(lines, Packer(), found.routes) as post:
        post.send(Line(Op.SEND, peer, 0), torch.full((5,), place.rank))
        return post.receive(Line(Op.RECV, peer, 0)).tolist()


@pytest.mark.parametrize(
    ("broken", "rank", "reason"),
    [
        (Flipping, 1, "other bytes came to rank 1 than rank 0 sent"),
        (Silent, 0, "rank 0 waited 1 s for its gloo check"),
        (Raising, 1, "RuntimeError: no way between the devices"),
    ],
)
def test_a_carrier_that_fails_its_check_at_one_rank_is_used_by_none(
    broken, rank, reason, stage_processes
):
    run = functools.partial(meet, broken=broken, rank=rank)
    (first, ones), (second, zeros) = stage_processes.run(run, 2, hang_s=30)
    assert first == second
    assert first.startswith("gloo, through host memory: ")
    assert reason in first or "waited 1 s" in first  # the other one waits for the broken one
    assert (ones, zeros) == ([1] * 5, [0] * 5)


def connect(place):
    """As ``meet``, where each transfer is a pair's first."""
    whole, meeting.Direct = meeting.Direct, Connecting
    try:
        with met(None, CPU, [(0, 1)], True, limit_s=20) as found:
            return found.carried, greet(place, found)
    finally:
        meeting.Direct = whole


def test_a_half_whose_posting_waits_for_the_other_is_no_deadlock(stage_processes):
    found = stage_processes.run(connect, 2, hang_s=40)
    assert found == [
        ("gloo, from device to device", [1] * 5),
        ("gloo, from device to device", [0] * 5),
    ]


def seats(*keys, lacking=()):
    return [_Seat(f"cuda:{k} of host", k, i not in lacking) for i, k in enumerate(keys)]


def test_ranks_on_one_device_keep_to_the_host_and_say_so():
    said = _unfit(seats("0", "1", "0"), "nccl")
    assert said == "ranks 0 and 2 share cuda:0 of host, and nccl takes one on each"


def test_a_rank_without_the_backend_keeps_all_to_the_host():
    assert _unfit(seats("0", "1", lacking=(1,)), "nccl") == "torch of rank 1 has no nccl"
    assert _unfit(seats("0", "1"), "nccl") == ""


def test_ranks_of_a_machine_take_its_devices_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = [str(device_of("cuda", local)) for local in range(3)]
    assert found == ["cuda:0", "cuda:1", "cuda:0"]
    assert str(device_of("cpu", 3)) == "cpu"


def test_all_who_send_each_other_something_are_checked():
    pipeline = Pipeline(schedule="flush", stages=3, groups=(3,), clip=True)
    assert pairs_of(pipeline.program()) == [(0, 1), (0, 2), (1, 2)]  # norms go to stage 0


class Stuck:
    """A device's event that never comes."""

    def record(self, stream):
        pass

    def query(self):
        return False


class Posted:
    """A transfer that was posted."""

    def wait(self):
        pass


def test_a_transfer_whose_peer_is_lost_ends_when_another_line_hears_of_it(monkeypatch):
    monkeypatch.setattr(direct.torch.cuda, "Event", Stuck)
    carrier = Direct(None, None, 0, CPU)
    carrier._stream = "a stream"
    threading.Timer(0.05, carrier.give_up).start()
    start = time.monotonic()
    with pytest.raises(WorkerError, match="another line of this stage is lost"):
        carrier._finish(Posted())
    assert time.monotonic() - start < 5
