"""Messages arrive in order, whatever their shapes, and no more of them than somebody wants."""

from __future__ import annotations

import time

import pytest
import torch

from shoal.pipeline.packing import Packer
from shoal.pipeline.post import LOOKAHEAD, Line, Post
from shoal.program.ir import Op

COUNT = 20


def exchange(place, shapes):
    """Every rank sends to the other at once, and waits for nothing before all is sent."""
    other = 1 - place.rank
    lines = {Line(op, other, kind): COUNT for op in (Op.SEND, Op.RECV) for kind in (0, 1)}
    with Post(lines, Packer()) as post:
        for number in range(COUNT):
            for kind in (0, 1):
                tree = (number, torch.full(shapes[number % len(shapes)], float(number + kind)))
                post.send(Line(Op.SEND, other, kind), tree)
        time.sleep(0.2)  # so that what may run ahead does
        ahead = [post._in[Line(Op.RECV, other, kind)]._ready.qsize() for kind in (0, 1)]
        got = [[post.receive(Line(Op.RECV, other, kind)) for _ in range(COUNT)] for kind in (1, 0)]
    return ahead, got


@pytest.mark.parametrize("shapes", [[(3,)], [(2, 3), (4,), (0, 5), (1000,)]])
def test_lines_keep_their_order_and_do_not_wait_for_each_other(shapes, stage_processes):
    import functools

    run = functools.partial(exchange, shapes=shapes)
    for ahead, (ones, zeros) in stage_processes.run(run, 2):
        assert max(ahead) <= LOOKAHEAD
        for kind, messages in ((1, ones), (0, zeros)):
            assert [number for number, _ in messages] == list(range(COUNT))
            for number, tensor in messages:
                assert tensor.shape == shapes[number % len(shapes)]
                assert bool((tensor == number + kind).all())
