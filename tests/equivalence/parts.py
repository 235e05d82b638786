"""Models some of whose weights are frozen, of a MiB and more, and data for them.

Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

import torch
import traps
from torch import Tensor, nn

WIDTH, DEPTH = 192, 5


class Adapter(nn.Module):
    """A block with two thin layers beside it, as LoRA has them."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.thin = nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.thin(x)


class Outside(nn.Module):
    """A trained layer that is no part of the blocks: FSDP2 has it in the model's own group."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(12, WIDTH)
        self.blocks = nn.ModuleList(_block() for _ in range(DEPTH))
        self.thin = nn.Linear(WIDTH, WIDTH, bias=False)
        self.leave = nn.Linear(WIDTH, 3)
        self.enter.requires_grad_(False)
        self.blocks.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x) + self.thin(x)
        return self.leave(x)


def _block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def _blocks() -> nn.Sequential:
    layers = [nn.Linear(12, WIDTH), *(_block() for _ in range(DEPTH)), nn.Linear(WIDTH, 3)]
    return nn.Sequential(*layers)


def none(hp):
    return _blocks()


def backbone(hp):
    """All but the head."""
    model = _blocks()
    model[:-1].requires_grad_(False)
    return model


def prefix(hp):
    model = _blocks()
    model[:3].requires_grad_(False)
    return model


def middle(hp):
    model = _blocks()
    model[2:-2].requires_grad_(False)
    return model


def layers(hp):
    """Of each block the first layer."""
    model = _blocks()
    for block in model[1:-1]:
        block[0].requires_grad_(False)
    return model


def weights(hp):
    """All but the biases."""
    model = _blocks()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


def adapters(hp):
    model = backbone(hp)
    for index in range(1, len(model) - 1):
        model[index] = Adapter(model[index])
    return model


def outside(hp):
    return Outside()


class Score(nn.Module):
    """A head of one row, which no replica shares with another."""

    def __init__(self) -> None:
        super().__init__()
        self.body = backbone({})[:-1]
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        score = self.leave(self.body(x))
        return torch.cat([score, -score, 0 * score], dim=1)


def one_row(hp):
    return Score()


class Masked(nn.Module):
    """A buffer as large as the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = backbone({})
        self.register_buffer("mask", torch.ones(len(self.body), 256, 256))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.mask[0, 0, 0]


def masked(hp):
    return Masked()


def data(hp):
    return traps.batches([4] * 4), traps.batches([4, 4], 30)
