"""A backward in two halves gives the gradients of a whole one, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from shoal.partition.halves import backward_of_inputs
from shoal.testing import same_bits


class Norms(nn.Module):
    """A parameter beside the way to the input, and one that feeds a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(6), nn.Linear(6, 6)
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return self.layer(self.norm(x)) * torch.sigmoid(self.shift) + x


MODULES = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)),
    "norms": Norms,
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
    "convolution": lambda: nn.Sequential(
        nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 1)
    ),
}


def run(module, x, *, halves):
    anchor = x.clone().requires_grad_()
    output = module(anchor)
    seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    half = None
    if halves:
        half = backward_of_inputs([(get_gradient_edge(output), seed)], [anchor])
    else:
        output.backward(seed)
    return anchor.grad, half


@pytest.mark.parametrize("name", MODULES)
def test_the_first_half_is_the_input_and_the_second_the_parameters(name):
    torch.manual_seed(1)
    module, x = MODULES[name](), torch.randn(5, 4, 6)
    expected, _ = run(module, x, halves=False)
    wanted = {n: p.grad for n, p in module.named_parameters()}
    module.zero_grad()
    found, half = run(module, x, halves=True)
    assert same_bits(found, expected)
    assert all(p.grad is None for p in module.parameters())
    half.run()
    for parameter, grad in wanted.items():
        assert same_bits(module.get_parameter(parameter).grad, grad), parameter
    assert not half.seams  # the graph is free


def test_a_parameter_with_two_uses_is_summed_in_the_usual_order():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return self.layer(F.gelu(self.layer(x)))

    torch.manual_seed(1)
    module, x = Twice(), torch.randn(5, 6)
    run(module, x, halves=False)
    wanted = module.layer.weight.grad
    module.zero_grad()
    found, half = run(module, x, halves=True)
    assert found is not None
    assert not half.seams  # all of it was the first half
    assert same_bits(module.layer.weight.grad, wanted)


def test_halves_of_several_micro_batches_add_up_in_their_order():
    torch.manual_seed(1)
    module = MODULES["linear"]()
    batches = [torch.randn(5, 6) for _ in range(3)]
    for x in batches:
        run(module, x, halves=False)
    wanted = [p.grad for p in module.parameters()]
    module.zero_grad()
    pending = [run(module, x, halves=True)[1] for x in batches]
    for half in pending:
        half.run()
    for parameter, grad in zip(module.parameters(), wanted, strict=True):
        assert same_bits(parameter.grad, grad)
