"""Operations with a backward of their own (``torch.autograd.Function``) train in arrays."""

from __future__ import annotations

from contextlib import nullcontext

import fusing
import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.distributions import Beta, Dirichlet
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.fusion import Declined
from shoal.fusion.passes import mode, ownfunctions
from shoal.recipes.recipe import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 3


class Squares(Function):
    """Two outputs of a tensor, a weight and a number."""

    @staticmethod
    def forward(ctx, x, weight, scale):
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return x * x * weight * scale, x.sum()

    @staticmethod
    def backward(ctx, grad, grad_sum):
        x, weight = ctx.saved_tensors
        grad = grad * ctx.scale
        return 2 * x * grad * weight + grad_sum, (x * x * grad).sum(0), None


class Rounds(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


round_by_name = Rounds.apply


class Drops(Function):
    @staticmethod
    def forward(ctx, x):
        mask = torch.rand_like(x)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Doubles(Function):
    """Writes into its argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Exponential(Function):
    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Batched(Exponential):
    generate_vmap_rule = True


class Through(Function):
    """Runs a module, whose parameters are not among its arguments."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.layer.weight, None


def squares(net, x):
    y, total = Squares.apply(x, net.weight, 0.5)
    return y + 1e-2 * total


OPERATIONS = {
    "two outputs": squares,
    "rounds": lambda net, x: Rounds.apply(4 * x) / 4,
    "rounds, by another name": lambda net, x: round_by_name(4 * x) / 4,
    "draws": lambda net, x: Drops.apply(x),
    "in place": lambda net, x: Doubles.apply(x.clone()),
    "of the newer form": lambda net, x: Exponential.apply(x),
    "that torch batches": lambda net, x: Batched.apply(x),
    "Beta": lambda net, x: Beta(F.softplus(x) + 1, F.softplus(-x) + 1).rsample(),
    "Dirichlet": lambda net, x: Dirichlet(F.softplus(x) + 1).rsample(),
}
OUTSIDE = {
    "runs a module": (lambda net, x: Through.apply(x, net.last), "Through, which is a torch.aut"),
    "runs again": (
        lambda net, x: checkpoint(net.middle, x.requires_grad_(), use_reentrant=True),
        "the model's code runs again in the backward",
    ),
}


class Net(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4).double() for _ in range(3))
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.operation = operation

    def forward(self, x):
        return self.last(torch.tanh(self.operation(self, torch.tanh(self.first(x)))))


def loss(output, batch):
    return output.square().mean()


def data(hp):
    draws = torch.Generator().manual_seed(hp["slot"])
    return [torch.randn(5, 4, generator=draws, dtype=torch.float64) for _ in range(3)], None


def sgd(named, hp):
    return torch.optim.SGD([p for _, p in named], lr=0.1 * (1 + hp["slot"]), momentum=0.9)


def recipe(operation):
    return Recipe(model=lambda hp: Net(operation), data=data, loss=loss, optimizer=sgd)


HPS = [{"slot": slot} for slot in range(WIDTH)]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_function_of_ones_own_computes_in_an_array_what_it_does_alone(operation):
    of = recipe(operation)
    array, losses = fusing.train(of, HPS, 3)
    for slot, hp in enumerate(HPS):
        plain = fusing.alone(of, hp, slot, 3)
        state = array.extract(slot)
        assert torch.equal(state["rng"].torch, plain.rng.torch)
        assert fusing.drift(state, plain.state()) <= 1e-12
        assert losses[slot] == pytest.approx(plain.losses, abs=1e-12)
    assert array.backend.notes == ()


def test_without_its_rule_it_is_declined(monkeypatch):
    monkeypatch.setattr(mode, "functions_by_slot", lambda slots: nullcontext())
    with pytest.raises(Declined, match=r"autograd\.Function with functorch"):
        fusing.train(recipe(squares), HPS, 1)


@pytest.mark.parametrize(("operation", "words"), OUTSIDE.values(), ids=OUTSIDE)
def test_one_that_reads_more_than_its_arguments_is_declined_with_the_reason(operation, words):
    with pytest.raises(Declined, match=words):
        fusing.train(recipe(operation), HPS, 1)


def test_it_does_in_a_torch_that_wrote_apply_otherwise(monkeypatch):
    monkeypatch.setattr(ownfunctions, "_INSTEAD", (lambda: None).__code__)
    before = vars(Function)["apply"]
    _, losses = fusing.train(recipe(squares), HPS, 1)
    plain = fusing.alone(recipe(squares), HPS[0], 0, 1)
    assert losses[0] == pytest.approx(plain.losses, abs=1e-12)
    assert vars(Function)["apply"] is before


def test_torchs_own_apply_is_back_behind_the_pass():
    function = vars(Function)["apply"].__func__
    before = function.__code__, function.__kwdefaults__
    fusing.train(recipe(squares), HPS, 1)
    assert (function.__code__, function.__kwdefaults__) == before
