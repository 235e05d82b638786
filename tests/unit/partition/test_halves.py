"""A backward in two halves gives the gradients of a whole one, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from shoal.partition.halves import backward_of_inputs, noting_hooks
from shoal.partition.track import AllocationTracker
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


class Hooked(nn.Module):
    """Halves a gradient on its way, at the node of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(6, 6), nn.Linear(6, 6), 0

    def forward(self, x):
        inside = self.first(x)
        inside.register_hook(self.hook)
        return self.second(inside)

    def hook(self, grad):
        self.calls += 1
        return grad / 2


def run(module, x, *, halves):
    anchor = x.clone().requires_grad_()
    with noting_hooks():
        output = module(anchor)
    seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    half = None
    if halves:
        half = backward_of_inputs([(get_gradient_edge(output), seed)], [anchor])
    else:
        output.backward(seed)
    return anchor.grad, half


def test_hooks_of_tensors_are_called_once():
    torch.manual_seed(1)
    module, x = Hooked(), torch.randn(5, 6)
    run(module, x, halves=False)
    wanted = {n: p.grad for n, p in module.named_parameters()}
    module.zero_grad()
    _, half = run(module, x, halves=True)
    half.run()
    assert module.calls == 2
    assert all(same_bits(p.grad, wanted[n]) for n, p in module.named_parameters())


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


ROWS = 5 * 8 * 4  # bytes of what the first layer makes


def test_between_the_halves_only_what_parameters_read_is_there():
    """Not the input of the GELU, nor what was handed on and back."""
    module, x = MODULES["linear"](), torch.randn(5, 6)
    anchor = x.requires_grad_()
    seed = torch.randn(5, 6)
    with AllocationTracker() as tracker:
        output = module(anchor)
        half = backward_of_inputs([(get_gradient_edge(output), seed)], [anchor])
        anchor.grad = None
        del output
    assert tracker.current_bytes == 2 * ROWS  # what the GELU made, and the gradient of its input
    half.run()
    assert not tracker.current_bytes


def test_what_saved_tensors_were_packed_into_by_the_users_hooks_is_left_alone():
    torch.manual_seed(1)
    module, x = MODULES["attention"](), torch.randn(5, 4, 6)
    run(module, x, halves=False)
    wanted = [p.grad for p in module.parameters()]
    module.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        _, half = run(module, x, halves=True)
    half.run()
    for parameter, grad in zip(module.parameters(), wanted, strict=True):
        assert same_bits(parameter.grad, grad)


def test_a_function_of_the_users_gives_up_what_it_saved():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, None)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            x, _ = ctx.saved_tensors
            return 2 * x * grad

    torch.manual_seed(1)
    layer, anchor = nn.Linear(6, 8), torch.randn(5, 6, requires_grad=True)
    with AllocationTracker() as tracker:
        output = Square.apply(layer(anchor))
        edge = get_gradient_edge(output)
        half = backward_of_inputs([(edge, torch.ones(5, 8))], [anchor])
        anchor.grad = None
        del output, edge
    assert tracker.current_bytes == ROWS  # the gradient that the layer's weights wait for
    half.run()
    made = layer(anchor.detach())
    assert same_bits(layer.bias.grad, (2 * made * torch.ones(5, 8)).sum(0).detach())
