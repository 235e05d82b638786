"""Models, optimizers and sources that do what few do; workers import them by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import nn


def batches(count=6, rows=4):
    generator = torch.Generator().manual_seed(11)
    return [
        (
            torch.randn(rows, 12, generator=generator),
            torch.randint(3, (rows,), generator=generator),
        )
        for _ in range(count)
    ]


def data(hp):
    return batches(), batches(2)


class Unsized:
    """Batches whose number nobody knows before the end."""

    def __iter__(self):
        yield from batches(5)


def unsized_data(hp):
    return Unsized(), batches(2)


def wide_validation(hp):
    return batches(), batches(1, rows=4096)


class DeadlyOnce:
    """Validation data that kills its process the first time it is read to the end."""

    def __init__(self, flag):
        self.flag = Path(flag)

    def __iter__(self):
        yield from batches(2)
        if not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def deadly_validation(hp):
    return batches(), DeadlyOnce(hp["flag"])


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


class Counting(nn.Module):
    """Counts the forwards in a buffer that another module holds too."""

    def __init__(self, counter):
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.register_buffer("counter", counter)

    def forward(self, x):
        return torch.relu(self.linear(x)) + 0.01 * self.counter


def chain(hp):
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(12, 12), nn.ReLU()) for _ in range(4)], nn.Linear(12, 3)
    )


def sharing(hp):
    """Blocks that read one buffer, by two names."""
    counter = torch.ones(12)
    return nn.Sequential(Counting(counter), Counting(counter), nn.Linear(12, 3))


class LateKey(torch.optim.Optimizer):
    """Makes a second state tensor in its second step, and looks whether it is there."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "first" not in state:
                    state["first"] = p.grad.clone()
                elif "second" not in state:
                    state["second"] = 2 * p.grad
                p.sub_(p.grad + state.get("second", state["first"]), alpha=group["lr"])


class Noisy(torch.optim.SGD):
    """Langevin dynamics: a step that draws random numbers."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-3)


def late_key(named_parameters, hp):
    return LateKey([p for _, p in named_parameters], lr=0.05)


def noisy(named_parameters, hp):
    return Noisy([p for _, p in named_parameters], lr=0.05)


def some_layers(named_parameters, hp):
    """Holds only the last layer; the others' gradients are never cleared by the loop."""
    return torch.optim.SGD([p for _, p in list(named_parameters)[-2:]], lr=0.05)
