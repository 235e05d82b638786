"""Models that pipelines got wrong once.

Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, WORDS = 16, 20


class Tied(nn.Module):
    """The first and the last stage have the embedding in common."""

    def __init__(self, hp) -> None:
        super().__init__()
        self.enter = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.leave = nn.Linear(WIDTH, WORDS, bias=False)
        self.leave.weight = self.enter.weight

    def forward(self, x):
        x = self.enter(x)
        for layer in self.blocks:
            x = x + layer(x)
        return self.leave(x)


class DrawsBetween(nn.Module):
    """The forward itself draws, before a block in the middle."""

    def __init__(self, hp) -> None:
        super().__init__()
        self.enter = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(6))
        self.leave = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x):
        x = self.enter(x)
        for number, layer in enumerate(self.blocks):
            x = x + layer(x)
            if number == 3:
                x = F.dropout(x, 0.1, self.training)
        return self.leave(x)


class CountsLate(Tied):
    """Its last block changes a buffer, but not in the first forward."""

    def __init__(self, hp) -> None:
        super().__init__(hp)
        self.blocks[-1].append(Third())


class Third(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training and bool(x.detach().abs().max() > max(1.5, self.largest)):
            self.largest.fill_(float(x.detach().abs().max()))
        return x


class Leaves(nn.Module):
    """A block that leaves something in an attribute and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.work = block()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.size = float(x.detach().abs().mean())
        if self.training:
            self.mean += x.detach().mean()
        return self.work(x)


class Finds(nn.Module):
    """A block that finds there what another one left."""

    def __init__(self, name: str, left: Leaves) -> None:
        super().__init__()
        self.work, self.name, self.left = block(), name, [left]

    def forward(self, x):
        return self.work(x) * getattr(self.left[0], self.name)


class FindsAttribute(Tied):
    """Its last block reads what its first one left, and the forward hands nothing on."""

    name = "size"

    def __init__(self, hp) -> None:
        super().__init__(hp)
        self.blocks[0] = left = Leaves()
        self.blocks[3] = Finds(self.name, left)


class FindsBuffer(FindsAttribute):
    name = "mean"


class Steadied(Tied):
    """The gradient of a late weight is divided by a running norm, which its hook keeps."""

    def __init__(self, hp) -> None:
        super().__init__(hp)
        kept = {"norm": 1.0}

        def steady(grad):
            kept["norm"] = 0.9 * kept["norm"] + float(grad.norm())
            return grad / kept["norm"]

        self.blocks[3][1].weight.register_hook(steady)


class Assigns(torch.optim.Optimizer):
    """Gives each parameter other memory at each step."""

    def __init__(self, parameters, rate: float) -> None:
        super().__init__(parameters, {"lr": rate})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad


def assigns(named_parameters, hp):
    return Assigns([parameter for _, parameter in named_parameters], hp["lr"])


def block() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())


KINDS = {
    kind.__name__: kind
    for kind in (Tied, DrawsBetween, CountsLate, FindsAttribute, FindsBuffer, Steadied)
}


def build(hp):
    return KINDS[hp["kind"]](hp)


def data(hp):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(WORDS, (2, 40, 6), generator=generator)
    train = [(x, y) for x, y in zip(rows[0].split(4), rows[1].split(4), strict=True)]
    return train, train[:3]


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


class Halving:
    """A loss that counts its steps, and is worth half after so many."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, output, batch):
        self.count += torch.is_grad_enabled()
        return loss(output, batch) * (0.5 if self.count > 14 else 1.0)


class DrawsWhenEvaluated(Tied):
    def forward(self, x):
        return super().forward(x) + (0 if self.training else torch.rand(()))


KINDS["DrawsWhenEvaluated"] = DrawsWhenEvaluated
