"""What a pass's code keeps where no list of operations sees it: the eager bits all the same."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import shoal
from shoal.runtime.capture.captures import Captures
from shoal.runtime.units import Micro, ResidentUnits

CPU = torch.device("cpu")


class Counting(nn.Module):
    """Reads a number from a buffer before it writes it."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x, seen = self.out(x), int(self.seen)
        self.seen += 1
        return x * (2.0 if seen >= 5 else 1.0)


class Tempered(nn.Module):
    """Reads a number from a parameter."""

    def __init__(self):
        super().__init__()
        self.out, self.heat = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.9))

    def forward(self, x):
        x = self.out(x) * self.heat
        return x * 2 if self.heat < 0.8 else x


class Warmth:
    def __init__(self):
        self.steps = 0

    def step(self):
        self.steps += 1
        return 2.0 if self.steps > 6 else 1.0


class Warming(nn.Module):
    """Has an object that counts."""

    def __init__(self):
        super().__init__()
        self.out, self.warmth = nn.Linear(4, 4), Warmth()

    def forward(self, x):
        return self.out(x) * self.warmth.step()


class Banking(nn.Module):
    """Writes to a tensor in a dict."""

    def __init__(self):
        super().__init__()
        self.out, self.bank = nn.Linear(4, 4), {"mean": torch.zeros(4)}

    def forward(self, x):
        x = self.out(x)
        found = x - self.bank["mean"]
        self.bank["mean"].mul_(0.9).add_(x.detach().mean(0))
        return found


class Drawing(nn.Module):
    """Has a generator of its own."""

    def __init__(self):
        super().__init__()
        self.out, self.stream = nn.Linear(4, 4), torch.Generator().manual_seed(3)

    def forward(self, x):
        return self.out(x) * torch.rand(4, generator=self.stream)


class Closing:
    """Makes modules of a class that closes over a bound, as a recipe's ``model(hp)`` may."""

    def __init__(self, bound):
        self.bound = bound

    def __call__(self):
        bound = self.bound

        class Bounded(nn.Module):
            def __init__(self):
                super().__init__()
                self.out = nn.Linear(4, 4)

            def forward(self, x):
                return self.out(x).clamp(-bound, bound)

        return Bounded()


def differs(make, captures, recipe, steps=10, scale=lambda step: 1.0):
    """The first step in which a captured twin differs; None if none does."""
    torch.manual_seed(0)
    models = make(), make()
    models[1].load_state_dict(models[0].state_dict())
    units = ResidentUnits(models[0], recipe, CPU), captures.units(models[1])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    found = None
    for step in range(steps):
        batch = torch.randn(6, 4) * scale(step)
        losses = []
        for unit, optimizer in zip(units, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(unit.backward(0, Micro(batch.clone())))
        state = [[*m.buffers(), *(p.grad for p in m.parameters())] for m in models]
        same = torch.equal(*losses) and all(map(torch.equal, *state))
        found = step if found is None and not same else found
        for optimizer in optimizers:
            optimizer.step()
    return found


@pytest.fixture
def recipe():
    return shoal.Recipe(
        model=lambda hp: None, data=lambda hp: ([], None), loss=lambda out, _: out.square().mean()
    )


@pytest.mark.parametrize("make", [Counting, Tempered, Warming, Banking, Drawing])
def test_state_that_operations_do_not_show_keeps_its_bits(make, recipe):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that such a pass runs as ever
        assert differs(make, Captures(recipe, CPU), recipe) is None


def test_code_that_closes_over_another_number_is_not_given_the_same_list(recipe):
    captures = Captures(recipe, CPU)

    def grows(step):
        return 0.1 if step < 4 else 10.0

    for bound in (5.0, 1.0):
        assert differs(Closing(bound), captures, recipe, scale=grows) is None
