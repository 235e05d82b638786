"""A stand-in for a GPU's allocator, and an operator that takes scratch memory from it."""

from __future__ import annotations

import pytest
import torch

from shoal.device.allocator import Allocator, Reading

ROUND = 512


class Memory:
    """Counts what operators here take: tensors are the CPU's, and only these tell of theirs."""

    def __init__(self):
        self.asked = self.most = self.given = self.most_given = self.resets = 0
        self.is_capturing = False

    def take(self, *sizes):
        self.asked += sum(sizes)
        self.given += sum(-(-size // ROUND) * ROUND for size in sizes)
        self.most, self.most_given = max(self.most, self.asked), max(self.most_given, self.given)

    def give_back(self, *sizes):
        self.asked -= sum(sizes)
        self.given -= sum(-(-size // ROUND) * ROUND for size in sizes)

    def read(self):
        return Reading(self.asked, self.most, self.most_given)

    def reset(self):
        self.resets += 1
        self.most, self.most_given = self.asked, self.given

    def is_busy(self):
        return self.is_capturing


_MEMORIES: list[Memory] = []  # of the test that runs


@torch.library.custom_op(
    "shoal_tests::halved", mutates_args=(), schema="(Tensor x, int scratch) -> Tensor"
)
def halved(x, scratch):
    for memory in _MEMORIES:
        memory.take(x.nbytes, scratch)
        memory.give_back(scratch)
    return x / 2


def _setup(ctx, inputs, output):
    ctx.scratch = inputs[1]


halved.register_autograd(
    lambda ctx, grad: (halved(grad, 2 * ctx.scratch), None), setup_context=_setup
)


@pytest.fixture
def operator():
    """Halves a tensor, and takes so many bytes inside; its backward takes twice as many."""
    return halved


@pytest.fixture
def memory(monkeypatch):
    """What the device's allocator counts, for whoever asks it here."""
    memory = Memory()
    _MEMORIES.append(memory)
    allocator = memory.allocator = Allocator(memory)
    for user in ("partition.track", "runtime.reports", "runtime.measuring.measure"):
        monkeypatch.setattr(f"shoal.{user}.allocator_here", lambda: allocator)
    yield memory
    _MEMORIES.remove(memory)
