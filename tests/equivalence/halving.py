"""Models of several kinds whose backwards are cut in two, with enough rows that activations count.

Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.recipes.recipe import Recipe

WIDTH, WORDS, CLASSES = 32, 50, 8


class Dense(nn.Module):
    """Blocks with a residual path, or without one."""

    def __init__(self, *, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
            for _ in range(6)
        )
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) if self.residual else block(x)
        return self.leave(x)


class Convolutions(nn.Module):
    """Residual blocks with BatchNorm, whose forwards change buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 16, 3, padding=1),
                nn.BatchNorm2d(16),
            )
            for _ in range(6)
        )
        self.leave = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.leave(x.mean((2, 3)))


class Words(nn.Module):
    """An embedding, blocks, and scores of words; ``tied``: with the embedding's weights."""

    def __init__(self, block: Any, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(6))
        self.leave = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.leave.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.leave(x).transpose(1, 2)


class Attention(nn.Module):
    """A block of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.mix(self.first(x)).view(rows, length, 3, 4, width // 4)
        seen = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)


MODELS = {
    "mlp": lambda: Dense(residual=False),
    "tower": lambda: Dense(residual=True),
    "convolutions": Convolutions,
    "gpt": lambda: Words(Attention),
    "tied gpt": lambda: Words(Attention, tied=True),
    "dropout": lambda: Words(encoder),
    "lstm": lambda: Words(Recurrent),
}
SHAPES = {"mlp": (256, WIDTH), "tower": (256, WIDTH), "convolutions": (8, 3, 12, 12)}


@dataclass(frozen=True)
class Build:
    name: str

    def __call__(self, hp):
        return MODELS[self.name]()


@dataclass(frozen=True)
class Batches:
    """Two steps of batches of one shape."""

    name: str
    micros: int

    def __call__(self, hp):
        generator = torch.Generator().manual_seed(0)
        made = []
        for _ in range(2 * self.micros):
            if self.name in SHAPES:
                shape = SHAPES[self.name]
                x = torch.randn(shape, generator=generator)
                y = torch.randint(CLASSES, shape[:1], generator=generator)
            else:
                x, y = torch.randint(WORDS, (2, 8, 32), generator=generator)
            made.append((x, y))
        return made, None


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def recipe(name: str, micros: int) -> Recipe:
    return Recipe(model=Build(name), data=Batches(name, micros), loss=loss, accumulate=micros)
