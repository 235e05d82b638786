"""Models and losses that no array can train; imported by tests and by worker processes."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F

from shoal.recipes.recipe import Recipe

ROWS, INSIDE, CLASSES = 6, 4, 3


class Net(nn.Module):
    """``odd`` says what its forward does besides."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.odd, self.steps = odd, 0
        self.register_buffer("state", torch.ones(5))
        self.enter, self.leave = nn.Linear(INSIDE, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        x = self.enter(x)
        if self.odd == "control flow":
            x = x if x.sum() > 0 else x.tanh()
        elif self.odd == "counts":
            self.steps += 1
            x = x * (1 + 1 / self.steps)
        elif self.odd == "goes on":
            x = x * self.state
            self.state = x.detach().mean(0).tanh()
        elif self.odd == "adds up":
            total = torch.zeros(ROWS, 5, dtype=torch.float64)
            total += x
            x = total
        elif self.odd == "draws":
            x = x * random.random()
        return self.leave(x)


class Closing(nn.Module):
    """Its forward calls a function that closes over its layers, as minGPT's blocks have one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"enter": nn.Linear(INSIDE, 5), "leave": nn.Linear(5, CLASSES)})
        parts = self.parts
        self.both = lambda x: parts.leave(parts.enter(x).tanh())

    def forward(self, x):
        return self.both(x)


def closing(hp):
    return Closing().double()


def model(hp):
    return Net(hp["odd"]).double()


def shaped(hp):
    """Hyperparameters that change shapes: each trial has another."""
    width = hp["width"]
    return nn.Sequential(nn.Linear(INSIDE, width), nn.Tanh(), nn.Linear(width, CLASSES)).double()


def data(hp):
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(5, ROWS, INSIDE, generator=draws, dtype=torch.float64)
    y = torch.randint(CLASSES, (5, ROWS), generator=draws)
    return list(zip(x, y, strict=True)), None


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


class Mixes:
    """A loss that keeps what it has seen: of all slots in an array."""

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)

    def __call__(self, output, batch):
        self.total.add_(output.detach().mean())
        return F.cross_entropy(output - 0 * self.total, batch[1])


def recipe(**changes) -> Recipe:
    return Recipe(**{"model": model, "data": data, "loss": loss, **changes})
