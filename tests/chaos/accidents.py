"""Trials that meet with an accident at their third batch; ``hp["accident"]`` says which.

Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shoal.recipes.recipe import Recipe

MARK = 999.0  # the value that tells the model: now
WIDTH = 16


class Unlucky(nn.Module):
    """Four dropout blocks; a marked batch sets the accident off in the second one."""

    def __init__(self, accident: str, flag: str) -> None:
        super().__init__()
        self.accident, self.flag = accident, flag
        self.enter = nn.Linear(12, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)
        )
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x):
        if self.accident == "first":
            raise ValueError("the model cannot begin")
        marked = bool((x[:, 0] == MARK).any())
        x = self.enter(x / MARK if marked else x)
        for index, block in enumerate(self.blocks):
            if marked and index == 1:
                happen(self.accident, self.flag)
            x = block(x)
        return self.leave(x)


def happen(accident: str, flag: str) -> None:
    if accident == "raise":
        raise RuntimeError("the model gave up")
    if accident == "exit":
        sys.exit("the model left")
    if accident == "kill again":
        os.kill(os.getpid(), signal.SIGKILL)
    if accident == "kill" and not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def build(hp):
    if hp["accident"] == "build":
        raise ValueError("the model cannot begin")
    return Unlucky(hp["accident"], hp.get("flag", ""))


def plain_batches(count: int = 6, offset: int = 0):
    generator = torch.Generator().manual_seed(70 + offset)
    return [
        (torch.randn(4, 12, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(count)
    ]


class Failing:
    """A source that ends with an error instead of its third batch."""

    def __iter__(self):
        yield from plain_batches(2)
        raise OSError("the disk is gone")


def data(hp):
    batches, accident = plain_batches(), hp["accident"]
    if accident == "data":
        return Failing(), None
    if accident == "kill late":
        return KillsInSecondEpoch(hp["source"], hp["flag"]), None
    x, _ = batches[2]
    if accident == "nan":
        x.fill_(torch.nan)
    else:
        x[0, 0] = MARK
    return batches, plain_batches(1, offset=1)


class KillsInSecondEpoch:
    """A loader whose process dies, once, before the fourth batch of its second epoch."""

    def __init__(self, source: str, flag: str) -> None:
        examples = [pair for x, y in plain_batches() for pair in zip(x, y, strict=True)]
        own = torch.Generator().manual_seed(3) if source == "own generator" else None
        shuffle = source != "in order"
        self.loader = DataLoader(examples, batch_size=4, shuffle=shuffle, generator=own)
        self.flag = Path(flag)
        self.epochs_done = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self):
        for index, batch in enumerate(self.loader):
            if (self.epochs_done, index) == (1, 3) and not self.flag.exists():
                self.flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch
        self.epochs_done += 1


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


class Metric:
    def __call__(self, output, batch):
        return output.mean().item()


def adamw(named_parameters, hp):
    parameters = [parameter for _, parameter in named_parameters]
    return torch.optim.AdamW(parameters, lr=hp["lr"], fused=True)


def recipe() -> Recipe:
    return Recipe(
        model=build,
        data=data,
        loss=loss,
        optimizer=adamw,
        metrics={"mean": Metric()},
        clip_grad_norm=0.5,
    )
