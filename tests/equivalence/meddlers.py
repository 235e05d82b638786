"""Recipes whose code changes, beside the passes, what passes read; imported by workers too.

``odd`` of the hyperparameters says who does. Everything is float64.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from shoal.recipes.recipe import Recipe

ROWS, INSIDE, CLASSES = 20, 6, 3
READ = {"factor": 1.0}


class Net(nn.Module):
    """``hp``: drop, and odd."""

    def __init__(self, hp) -> None:
        super().__init__()
        self.odd, self.rate, self.temperature = hp["odd"], hp["rate"], 1.0
        self.enter, self.leave = nn.Linear(INSIDE, 8), nn.Linear(8, CLASSES)
        self.drop = nn.Dropout(hp["drop"])
        sign = -1.0 if hp["rate"] < 0 else 1.0
        self.register_buffer("matrix", torch.eye(2) * sign)
        self.enter.weight.net = self  # by which a schedule may come to it

    def forward(self, x):
        y = self.leave(self.drop(torch.tanh(self.enter(x)))) / self.temperature
        if self.odd == "hidden" and not self.training:
            return y * (1.0 if math.exp(-self.rate) < 0.1 else 5.0)
        if self.odd == "cholesky" and not self.training:
            return y + 0 * torch.linalg.cholesky(self.matrix).sum()
        return y


def model(hp):
    READ["factor"] = 1.0
    return Net(hp).double()


def cut(hp):
    """One with blocks."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(hp["drop"])) for _ in range(3)]
    return nn.Sequential(nn.Linear(INSIDE, 8), *blocks, nn.Linear(8, CLASSES)).double()


class Counting(Sampler):
    """Begins each epoch by changing what the loss reads."""

    def __iter__(self):
        READ["factor"] += 0.3
        return iter(torch.randperm(ROWS).tolist())

    def __len__(self):
        return ROWS


class Stream(IterableDataset):
    """Without a length."""

    def __init__(self, rows) -> None:
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def noisy(rows):
    x = torch.stack([row[0] for row in rows])
    return x + 0.1 * torch.randn_like(x), torch.stack([row[1] for row in rows])


def data(hp):
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, INSIDE, generator=draws, dtype=torch.float64)
    rows = TensorDataset(x, torch.randint(CLASSES, (ROWS,), generator=draws))
    if hp["odd"] == "noise":
        return DataLoader(rows, 4, shuffle=True, collate_fn=noisy), None
    order = {"sampler": Counting()} if hp["odd"] == "data" else {"shuffle": True}
    valid = Stream(list(rows)[:8]) if hp["odd"] == "stream" else list(rows)[:8]
    return DataLoader(rows, 5, **order), DataLoader(valid, 4)


def loss(output, batch):
    return F.cross_entropy(output, batch[1]) * READ["factor"]


def factor(output, batch):
    """A metric that changes what the loss reads, if it is told so by its name."""
    return output.square().mean().item()


def meddling(output, batch):
    READ["factor"] += 0.1
    return 0.0


class Optimizer(torch.optim.SGD):
    """Raises the dropout."""

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["params"][0].net.drop.p += 0.05


def optimizer(named, hp):
    parameters = [parameter for _, parameter in named]
    if hp["odd"] == "optimizer":
        return Optimizer(parameters, lr=hp["lr"])
    made = torch.optim.SGD(parameters, lr=hp["lr"], momentum=0.9)
    if hp["odd"] == "hook":
        net = parameters[0].net

        def cool(*_):
            net.temperature *= 0.9

        made.register_step_post_hook(cool)
    return made


class Schedule(LambdaLR):
    """Changes what ``odd`` says after each step."""

    def __init__(self, optimizer, odd) -> None:
        self.net, self.odd = optimizer.param_groups[0]["params"][0].net, odd
        super().__init__(optimizer, lambda epoch: 1.0)

    def step(self, *given):
        super().step(*given)
        if self.odd == "temperature":
            self.net.temperature = 0.9**self.last_epoch
        elif self.odd == "mode":
            self.net.drop.eval()
        elif self.odd == "buffer":
            self.net.matrix = self.net.matrix * 1.1
        elif self.odd == "global":
            READ["factor"] = 1 + 0.2 * self.last_epoch


def schedule(optimizer, hp):
    return Schedule(optimizer, hp["odd"])


def recipe(**changes) -> Recipe:
    return Recipe(
        **{"model": model, "data": data, "loss": loss, "optimizer": optimizer, **changes}
    )


# -- a step of one's own --------------------------------------------------------------------------


def step(models, batch, optimizers, hp, number):
    READ["factor"] = 1.0 if number == 0 else READ["factor"] * 1.1
    optimizers.zero_grad()
    found = F.cross_entropy(models(batch[0]), batch[1]) * READ["factor"]
    found.backward()
    optimizers.step()
    return found


def evaluate(models, batch, hp):
    return {"loss": F.cross_entropy(models(batch[0]), batch[1]).item()}
