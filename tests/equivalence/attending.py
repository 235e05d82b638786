"""Models of torch's attention layers, which have another way for evaluation than for training.

Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LENGTH = 32, 7


class Around(nn.Module):
    """What is before and after; where a row's first number is 0 it is padding."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.enter = nn.Linear(4, WIDTH)
        self.body = self.make_body()
        self.leave = nn.Linear(WIDTH, 3)

    def make_layer(self) -> nn.Module:
        return nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=self.batch_first
        )

    def make_body(self) -> nn.Module:
        return nn.ModuleList(self.make_layer() for _ in range(3))

    def attend(self, x: Tensor, padding: Tensor) -> Tensor:
        for layer in self.body:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        padding = x[:, :, 0] == 0
        x = self.enter(x)
        if self.batch_first:
            x = self.attend(x, padding)
        else:
            x = self.attend(x.transpose(0, 1), padding).transpose(0, 1)
        return self.leave(x).mean(1)


class Layers(Around):
    """Encoder layers one after the other."""


class Padded(Around):
    """Encoder layers that are told what is padding."""

    def attend(self, x: Tensor, padding: Tensor) -> Tensor:
        for layer in self.body:
            x = layer(x, src_key_padding_mask=padding)
        return x


class Encoder(Around):
    """Torch's encoder, which looks at its first layer's weights, and nests its input."""

    nests = True

    def make_body(self) -> nn.Module:
        return nn.TransformerEncoder(
            self.make_layer(), 3, enable_nested_tensor=self.nests and self.batch_first
        )

    def attend(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.body(x, src_key_padding_mask=padding)


class Flat(Encoder):
    """One that nests nothing."""

    nests = False


class Attention(Around):
    """Attention by itself."""

    def make_layer(self) -> nn.Module:
        return nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=self.batch_first)

    def attend(self, x: Tensor, padding: Tensor) -> Tensor:
        for layer in self.body:
            x = x + layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return x


KINDS = {kind.__name__.lower(): kind for kind in (Layers, Padded, Encoder, Flat, Attention)}


def model(hp):
    """Kind and order of dimensions are hyperparameters; and what is frozen."""
    made = KINDS[hp["kind"]](batch_first=hp["batch_first"])
    if hp.get("frozen"):
        made.body.requires_grad_(False)
    return made


def sequences(seed: int, rows: int):
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, LENGTH, 4, generator=drawn)
    x[1, -2:] = 0.0
    return x, torch.randint(3, (rows,), generator=drawn)


def data(hp):
    return [sequences(n, 4) for n in range(5)], [sequences(50 + n, 16) for n in range(3)]


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def steepness(output, batch):
    """A metric to which every bit counts."""
    return output.double().square().sum().item()
