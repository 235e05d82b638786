"""A whole sharded forward and backward, unit after unit: what the pilot runs and tests compare.

The order and the bookkeeping of random state and buffers are those of a worker; nothing
is moved or freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.partition.chain import Chain, Micro
from shoal.partition.preserve import read_buffers, write_buffers
from shoal.partition.units import (
    AfterForward,
    BackwardResult,
    NoteSaved,
    run_backward,
    run_forward,
)
from shoal.partition.wires import Wires
from shoal.recipes.recipe import Batch, Output, autocast
from shoal.rng import RngState, capture_rng, restore_rng

Ranges = Sequence[tuple[int, int]]


@dataclass(slots=True)
class Visit:
    """What a shard's forward must leave for its recompute."""

    wires: Wires
    rng: RngState
    buffers: dict[str, Tensor] = field(default_factory=dict)


def every_layer(chain: Chain) -> tuple[tuple[int, int], ...]:
    """The finest cut: each layer its own shard."""
    return tuple((layer, layer + 1) for layer in range(chain.num_layers))


def forward_all(chain: Chain, micro: Micro, ranges: Ranges) -> list[Visit]:
    """Forward units of all shards but the last; the visit of every shard, the last included."""
    visits: list[Visit] = []
    wires: Wires = {}
    for start, stop in ranges[:-1]:
        visits.append(open_visit(chain, start, stop, wires))
        made = run_forward(chain, micro, start, stop, wires)
        wires = {w: made[w] if w in made else wires[w] for w in chain.live_wires(stop, micro)}
    visits.append(Visit(wires, capture_rng(chain.device)))
    return visits


def open_visit(chain: Chain, start: int, stop: int, wires: Wires) -> Visit:
    """Random state and changing buffers as they are before a shard's forward."""
    names = [name for layer in range(start, stop) for name in chain.changing_buffers(layer)]
    return Visit(wires, capture_rng(chain.device), read_buffers(chain.model, names))


def recompute(
    chain: Chain,
    micro: Micro,
    shard: tuple[int, int],
    visit: Visit,
    after: BackwardResult,
    *,
    accumulate: int = 1,
    after_forward: AfterForward | None = None,
    note_saved: NoteSaved | None = None,
) -> BackwardResult:
    """A shard's backward, from the state its forward saw; that state is put back afterwards."""
    with as_before(chain, visit):
        return run_backward(
            chain,
            micro,
            *shard,
            visit.wires,
            grads=after.grads,
            tied=after.tied,
            accumulate=accumulate,
            after_forward=after_forward,
            note_saved=note_saved,
        )


@contextmanager
def as_before(chain: Chain, visit: Visit) -> Iterator[None]:
    """Random state and buffers are what a shard's forward saw; afterwards what they are now."""
    rng = capture_rng(chain.device)
    buffers = read_buffers(chain.model, visit.buffers)
    restore_rng(visit.rng, chain.device)
    write_buffers(chain.model, visit.buffers)
    try:
        yield
    finally:
        write_buffers(chain.model, buffers)
        restore_rng(rng, chain.device)


def sharded_backward(chain: Chain, batch: Batch, ranges: Ranges, *, accumulate: int = 1) -> Tensor:
    """Forward and backward of one micro-batch, shard by shard; the loss.

    Gradients, buffers and random state are afterwards those of a plain forward and
    ``(loss / accumulate).backward()``.
    """
    micro = chain.begin(batch)
    visits = forward_all(chain, micro, ranges)
    last = visits.pop()
    result = run_backward(chain, micro, *ranges[-1], last.wires, accumulate=accumulate)
    loss = result.loss
    assert loss is not None
    for shard, visit in zip(reversed(ranges[:-1]), reversed(visits), strict=True):
        result = recompute(chain, micro, shard, visit, result, accumulate=accumulate)
    return loss


def sharded_evaluation(chain: Chain, batch: Batch, ranges: Ranges) -> tuple[Tensor, Output]:
    """Loss and output of one batch, shard by shard, without gradients."""
    micro = chain.begin(batch)
    wires = forward_all(chain, micro, ranges)[-1].wires
    return run_evaluation(chain, micro, ranges[-1][0], wires)


def run_evaluation(chain: Chain, micro: Micro, start: int, wires: Wires) -> tuple[Tensor, Output]:
    """Loss and output from layer ``start`` on, without gradients."""
    with torch.no_grad(), autocast(chain.recipe, chain.device):
        return chain.loss(micro, start, wires)
