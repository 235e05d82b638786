"""Messages arrive in order, whatever their shapes and their way, and no more than are wanted."""

from __future__ import annotations

import functools
import time

import pytest
import torch
import torch.distributed as dist

from shoal.core.errors import WorkerError
from shoal.pipeline.meeting import met
from shoal.pipeline.packing import Packer
from shoal.pipeline.post import LOOKAHEAD, Line, Post
from shoal.program.ir import Op

COUNT = 20
CPU = torch.device("cpu")
KINDS = (0, 1)


def pairs_among(world):
    return [(low, high) for high in range(world) for low in range(high)]


def exchange(place, shapes, direct):
    """Every rank sends to all others at once, and waits for nothing before all is sent."""
    others = [rank for rank in range(place.world) if rank != place.rank]
    ends = [(other, kind) for other in others for kind in KINDS]
    lines = {Line(op, *end): COUNT for op in (Op.SEND, Op.RECV) for end in ends}
    pairs = pairs_among(place.world)
    with met(None, CPU, pairs, direct) as found, Post(lines, Packer(), found.routes) as post:
        for number in range(COUNT):
            for other, kind in ends:
                value = 100.0 * place.rank + 10 * kind + number
                tree = (number, torch.full(shapes[number % len(shapes)], value))
                post.send(Line(Op.SEND, other, kind), tree)
        time.sleep(0.2)  # so that what may run ahead does
        ahead = [post._in[Line(Op.RECV, *end)]._ready.qsize() for end in ends]
        got = {
            end: [post.receive(Line(Op.RECV, *end)) for _ in range(COUNT)]
            for end in reversed(ends)
        }
    return found.carried, ahead, got


@pytest.mark.parametrize(
    ("world", "direct", "shapes"),
    [
        (2, False, [(3,)]),
        (2, False, [(2, 3), (4,), (0, 5), (1000,)]),
        (2, True, [(3,)]),
        (4, True, [(2, 3), (4,), (0, 5), (1000,)]),
    ],
)
def test_lines_keep_their_order_and_do_not_wait_for_each_other(
    world, direct, shapes, stage_processes
):
    run = functools.partial(exchange, shapes=shapes, direct=direct)
    for carried, ahead, got in stage_processes.run(run, world, hang_s=30):
        assert carried.endswith("to device" if direct else "host memory")
        assert max(ahead) <= LOOKAHEAD
        assert len(got) == (world - 1) * len(KINDS)
        for (other, kind), messages in got.items():
            assert [number for number, _ in messages] == list(range(COUNT))
            for number, tensor in messages:
                assert tensor.shape == shapes[number % len(shapes)]
                assert bool((tensor == 100 * other + 10 * kind + number).all())


def wait_beside_a_broken_line(place):
    """What rank 1 sends on line 0 has no form; rank 0 waits on line 1, where nothing comes."""
    if place.rank:
        notice = torch.tensor([1, 3, 64] + [0] * 5).view(torch.uint8)
        for frame in (notice, torch.zeros(3, dtype=torch.uint8)):
            dist.send(frame, dst=0, tag=0)
        return ""
    lines = {Line(Op.RECV, 1, kind): 1 for kind in KINDS}
    with pytest.raises(WorkerError) as caught, Post(lines, Packer()) as post:
        post.receive(Line(Op.RECV, 1, 1))
    return str(caught.value)


def test_who_waits_on_one_line_hears_that_another_is_lost(stage_processes):
    said, _ = stage_processes.run(wait_beside_a_broken_line, 2, hang_s=30)
    assert "the connection to stage 1 is lost" in said
