"""Parameters of several types, clipped: torch adds up their norms in an order of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.core.technique import Pipelined
from shoal.recipes.recipe import Recipe
from shoal.recipes.subsets import clip_factor
from shoal.replicas import shard_norms

WIDTH = 16
TYPES = [torch.float32, torch.bfloat16, torch.complex64]


class Fourier(nn.Module):
    """Complex weights between real ones."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(torch.fft.irfft(torch.fft.rfft(x) * self.weights, n=WIDTH)).tanh()


def build(hp):
    return nn.Sequential(*[Fourier() for _ in range(6)], nn.Linear(WIDTH, 3))


def data(hp):
    draws = torch.Generator().manual_seed(1)
    rows = torch.randn(4, 5, WIDTH, generator=draws)
    return list(zip(rows, torch.randint(3, (4, 5), generator=draws), strict=True)), None


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


@pytest.mark.parametrize("technique", ["resident", shoal.Spilled(shards=2), Pipelined(stages=2)])
def test_complex_weights_are_clipped_to_the_plain_loops_bits(technique, run_study, assert_alone):
    recipe = Recipe(model=build, data=data, loss=loss, clip_grad_norm=0.1)
    space, staged = shoal.grid(lr=[0.1, 0.01]), isinstance(technique, Pipelined)
    report = run_study(recipe, space, technique=technique, devices=1 + staged, steps=8)
    assert_alone(report, report.trials, recipe, steps=8)


@pytest.mark.parametrize("other", TYPES[1:])
def test_the_factor_is_torchs_own(other):
    for seed in range(20):
        draws = torch.Generator().manual_seed(seed)
        grads = [
            (100 * torch.randn(7, generator=draws)).to(other if n % 3 else torch.float32)
            for n in range(11)
        ]
        norms = [torch.linalg.vector_norm(grad) for grad in grads]
        total = nn.utils.get_total_norm(grads)
        expected = torch.clamp(0.5 / (total + 1e-6), max=1.0)
        assert torch.equal(clip_factor(0.5, norms, [g.dtype for g in grads]), expected)


def test_the_norm_of_a_replicas_shard_has_the_imaginary_part():
    grads = [torch.tensor([3.0, 4.0j]), torch.tensor([2.0])]
    assert shard_norms(grads).tolist() == [5.0, 2.0]
