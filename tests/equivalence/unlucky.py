"""Models and data that a review broke arrays, stages and copies with."""

from __future__ import annotations

import squads
import torch
from torch import nn
from torch.nn import functional as F

from shoal.recipes.recipe import Recipe


class Probability(nn.Module):
    """Its output is a probability, and its loss raises where it is NaN."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Dropout(0.1)) for _ in range(5)
        )
        self.leave = nn.Linear(12, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return torch.sigmoid(self.leave(x))


def probabilities(hp):
    draws = torch.Generator().manual_seed(3)
    return [
        (torch.randn(4, 12, generator=draws), torch.rand(4, 1, generator=draws)) for _ in range(8)
    ], None


def probability() -> Recipe:
    return Recipe(
        model=lambda hp: Probability(),
        data=probabilities,
        loss=lambda output, batch: F.binary_cross_entropy(output, batch[1]),
        accumulate=4,
    )


class Asking(nn.Module):
    """In evaluation its code asks a tensor, on which the slots of an array do not agree."""

    def __init__(self, hp):
        super().__init__()
        self.body, self.head = squads.mlp(hp)[:-1], nn.Linear(8, squads.CLASSES).double()

    def forward(self, x):
        if not self.training and bool(x[:, 0].mean() > 0):
            x = x * 1.0
        return self.head(self.body(x))


def disagreeing(hp):
    """The second validation batch is another one in each trial."""
    draws = torch.Generator().manual_seed(5)
    train = [
        (
            torch.randn(8, squads.INSIDE, generator=draws, dtype=torch.float64),
            torch.randint(squads.CLASSES, (8,), generator=draws),
        )
        for _ in range(6)
    ]
    x, y = train[0]
    sign = 1 if hp["lr"] > 0.005 else -1
    return train, [(x.abs(), y), (sign * x.abs(), y)]


def asking() -> Recipe:
    return squads.recipe(model=Asking, data=disagreeing)


class Later(nn.Module):
    """Notes large inputs in a buffer, of which there is none in the first batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, x):
        if bool(x[0, 0].detach() > 50):
            self.peak.copy_(x.detach()[0, 0])
        return self.linear(x.clamp(-1, 1))


def later() -> Recipe:
    draws = torch.Generator().manual_seed(3)
    some = [(torch.randn(4, 12, generator=draws), torch.zeros(4).long()) for _ in range(8)]
    some[6][0][0, 0] = 99.0
    return Recipe(
        model=lambda hp: nn.Sequential(Later(), *[nn.Linear(12, 12) for _ in range(3)]),
        data=lambda hp: (some, None),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        accumulate=4,
    )


class Normed(nn.Module):
    """Blocks with batch statistics and dropout."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Dropout(0.2)) for _ in range(5)
        )
        self.leave = nn.Linear(12, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def uneven() -> Recipe:
    """A new size of batch comes in the middle of a step."""
    draws = torch.Generator().manual_seed(0)
    some = [
        (torch.randn(rows, 12, generator=draws), torch.randint(3, (rows,), generator=draws))
        for rows in (4, 4, 4, 4, 4, 3, 4, 4, 5, 4, 4, 4)
    ]
    return Recipe(
        model=lambda hp: Normed(),
        data=lambda hp: (some, None),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        accumulate=4,
    )
