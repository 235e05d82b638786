"""The tracker against sizes known by hand, and against torch's own profiler."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.partition.track import AllocationTracker


def test_views_and_what_was_there_before_are_not_counted():
    before = torch.zeros(1000)
    with AllocationTracker() as tracker:
        before.mul_(2)
        fresh = torch.zeros(10)
        view = fresh.view(2, 5)
        other = before[:500]

    assert tracker.current_bytes == tracker.peak_bytes == 40
    del fresh, other
    assert tracker.current_bytes == 40
    del view
    assert tracker.current_bytes == 0


def test_the_peak_counts_what_lives_at_the_same_time():
    with AllocationTracker() as tracker:
        for _ in range(3):
            torch.zeros(100).add(1)

    assert (tracker.peak_bytes, tracker.current_bytes) == (800, 0)
    assert tracker.allocated_bytes == 3 * 800


def test_tensors_from_python_numbers_and_resized_ones_are_counted():
    with AllocationTracker() as tracker:
        numbers = torch.tensor([1.0, 2.0])
        grown = torch.empty(0)
        grown.resize_(25)

    assert tracker.current_bytes == numbers.nbytes + 100


def test_a_backward_is_counted_with_its_gradients():
    weight = torch.ones(64, 64, requires_grad=True)
    x = torch.ones(8, 64)
    with AllocationTracker() as tracker:
        (x @ weight).tanh().sum().backward()

    assert tracker.current_bytes == weight.grad.nbytes
    assert tracker.peak_bytes >= weight.grad.nbytes + 8 * 64 * 4


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.drop(self.mlp(mixed.transpose(1, 2).flatten(2)))


@pytest.mark.filterwarnings("ignore")
def test_the_peak_of_a_gpt_step_is_the_profilers_to_the_byte():
    model = nn.Sequential(
        nn.Embedding(50, 32), *(Attention(32) for _ in range(3)), nn.Linear(32, 50)
    )
    ids = torch.randint(50, (4, 16))

    def step():
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        model.zero_grad(set_to_none=True)

    step()
    with AllocationTracker() as tracker:
        step()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()

    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert tracker.peak_bytes == peak
    assert tracker.current_bytes == 0
