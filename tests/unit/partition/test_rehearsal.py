"""What could wait on the host is tried once while shards are measured; a failure is a reason."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import nn

from shoal.partition import rehearsal
from shoal.partition.build import build_chain
from shoal.partition.drive import every_layer, forward_all, recompute
from shoal.partition.measure import measure_shards
from shoal.partition.units import BackwardResult

CPU = torch.device("cpu")


class Shaky(torch.autograd.Function):
    """Its backward is never twice the same, as of sums that are taken in any order."""

    counter = itertools.count()

    @staticmethod
    def forward(ctx, x, weight, hides):
        ctx.hidden = weight.t() if hides else None
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        turned = weight.t() if ctx.hidden is None else ctx.hidden
        noise = 1e-4 * next(Shaky.counter)
        return grad @ turned.t() + noise, grad.t() @ x, None


class Block(nn.Module):
    hides: bool | None = None

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x):
        y = self.norm(torch.dropout(x, 0.1, self.training))
        if self.hides is None:
            return x + torch.tanh(self.linear(y))
        return x + torch.tanh(Shaky.apply(y, self.linear.weight, self.hides))


class Steady(Block):
    hides = False


class Hiding(Block):
    hides = True


@pytest.fixture
def chain_of(make_recipe):
    def make(kind):
        model = nn.Sequential(*(kind() for _ in range(4)), nn.Linear(16, 3))
        batch = torch.randn(8, 16), torch.randint(3, (8,))
        return build_chain(model, make_recipe(model), batch, CPU), batch

    return make


def measured(chain, batch):
    return measure_shards(chain, (2, 3, 4), batch, {}, timed=lambda work: 1.0)[1]


def state_of(chain):
    named = [*chain.model.named_parameters(), *chain.model.named_buffers()]
    return {name: (tensor.data_ptr(), tensor.detach().clone()) for name, tensor in named}


def same(one, other):
    return all(one[n][0] == other[n][0] and torch.equal(one[n][1], other[n][1]) for n in one)


def test_parameters_and_buffers_are_afterwards_where_they_were(chain_of):
    chain, batch = chain_of(Block)
    before = state_of(chain)
    assert measured(chain, batch).movable_bytes > 0
    assert same(before, state_of(chain))
    assert all(parameter.grad is None for parameter in chain.model.parameters())


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (torch.OutOfMemoryError("tried to allocate 2 GiB"), "no memory left to try it .*2 GiB"),
        (KeyError("w"), "failed when that was tried: KeyError: 'w'"),
        (RuntimeError("does not support saved tensor hooks"), "allows no hooks"),
    ],
)
def test_whatever_fails_is_a_reason_and_leaves_nothing_behind(error, why, chain_of, monkeypatch):
    chain, batch = chain_of(Block)
    before = state_of(chain)

    def fail(cell):
        raise error

    monkeypatch.setattr(rehearsal, "_move", fail)
    shard = measured(chain, batch)
    assert shard.movable_bytes is None
    assert shard.saved_bytes > 0
    assert re.search(why, shard.why_not_movable)
    assert same(before, state_of(chain))


def test_backwards_that_never_repeat_themselves_are_looked_through_for_nan(chain_of):
    assert measured(*chain_of(Steady)).movable_bytes > 0
    stuck = measured(*chain_of(Hiding))
    assert stuck.movable_bytes is None
    assert "where hooks do not see it" in stuck.why_not_movable


def test_a_recompute_that_fails_puts_buffers_and_random_state_back(chain_of):
    chain, batch = chain_of(Block)
    micro = chain.begin(batch)
    visits = forward_all(chain, micro, every_layer(chain))
    before, draws = state_of(chain), torch.get_rng_state()
    wire = chain.live_wires(3, micro)[0]
    after = BackwardResult(grads={wire: torch.zeros(8, 16)})

    def fail(made):
        raise KeyError("w")

    with pytest.raises(KeyError):
        recompute(chain, micro, (2, 3), visits[2], after, after_forward=fail)
    assert same(before, state_of(chain))
    assert torch.equal(draws, torch.get_rng_state())
