"""A study that mixes what can go wrong at a kill, and processes that run it.

Imported by tests, by this name by worker processes, and by the files that ``Case`` writes.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.observe import read_events
from shoal.recipes.recipe import Recipe
from shoal.runtime.saving import saver
from shoal.testing import assert_same, plain_loop
from shoal.verify import read_losses

KINDS = ("spilled", "workers", "resident")
MEMORY = "768KiB"  # of a device: the spilled model needs more than twice as much
DEVICES = 2
PACE_S = "SHOAL_TEST_PACE_S"  # the environment's name for how long a batch takes at least
BLOCK = "SHOAL_TEST_BLOCK"  # a file; while it is there the first step does not end
FULL = "SHOAL_TEST_FULL"  # a file; while it is there the disk has no room for generations


class Mixed(nn.Module):
    """Blocks with dropout, and BatchNorm where ``norm``; wide ones fit no device."""

    def __init__(self, width: int, blocks: int, *, norm: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(12, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width),
                nn.BatchNorm1d(width) if norm else nn.LayerNorm(width),
                nn.GELU(),
                nn.Dropout(0.2),
            )
            for _ in range(blocks)
        )
        self.leave = nn.Linear(width, 3)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def build(hp):
    if hp["kind"] == "spilled":
        return Mixed(128, 6, norm=False)
    return Mixed(16, 2, norm=hp["kind"] == "workers")


def data(hp):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(96, 12, generator=generator)
    y = torch.randint(3, (96,), generator=generator)
    train, valid = TensorDataset(x[:80], y[:80]), TensorDataset(x[80:], y[80:])
    kind = hp["kind"]
    own = torch.Generator().manual_seed(11) if kind == "resident" else None
    workers = 1 if kind == "workers" else 0
    return (
        DataLoader(train, 4, shuffle=True, generator=own, num_workers=workers),
        DataLoader(valid, 8),
    )


def loss(output, batch):
    if is_worker():
        wait()
        lack_space()
    return F.cross_entropy(output, batch[1])


def is_worker() -> bool:
    """Whether this is a device's process, and not the plain loop."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == "shoal.runtime.worker"


def wait() -> None:
    """Take as long over a batch as the test wants."""
    time.sleep(float(os.environ.get(PACE_S, "0.004")))
    block = os.environ.get(BLOCK, "")
    if os.path.exists(block):
        Path(f"{block}.reached").touch()  # by somebody
    while os.path.exists(block):
        time.sleep(0.01)


def lack_space() -> None:
    """From now on this process's disk is full while the file is there."""
    flag = os.environ.get(FULL)
    if flag and os.posix_fallocate.__name__ != "refuse":
        real = os.posix_fallocate

        def refuse(descriptor: int, offset: int, size: int) -> None:
            if os.path.exists(flag):
                raise OSError(28, "No space left on device")
            real(descriptor, offset, size)

        saver.SHARE = 1.0  # the next attempt comes soon, however slow this machine is
        os.posix_fallocate = refuse


def schedule(optimizer, hp):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)


def accuracy(output, batch):
    return (output.argmax(1) == batch[1]).float().mean().item()


def recipe() -> Recipe:
    return Recipe(
        model=build,
        data=data,
        loss=loss,
        schedule=schedule,
        metrics={"accuracy": accuracy},
        clip_grad_norm=0.5,
        accumulate=2,
    )


def make(directory, *, kinds=KINDS, lr=(3e-3,), name="k", **options) -> shoal.Study:
    """The study: 10 steps an epoch."""
    space = shoal.grid(kind=list(kinds), lr=list(lr))
    settings = {"epochs": 3, "checkpoint_every": 0.3} | options
    return shoal.Study(name, recipe(), space=space, directory=directory, **settings)


def hardware(devices: int = DEVICES) -> shoal.Hardware:
    return shoal.Hardware.virtual(devices=devices, memory=MEMORY)


def run(study: shoal.Study, workers, *, devices: int = 1, **options) -> shoal.Report:
    """Run it in this process on workers that are warm."""
    shown = {"progress": False, "timeline": False, "workers": workers}
    return study.run(hardware=hardware(devices), **(shown | options))


def written(study: shoal.Study, kind: type) -> list:
    """Its events of a kind, in order."""
    return [event for event in read_events(study.directory) if isinstance(event, kind)]


@functools.cache
def alone(kind: str, lr: float, seed: int, epochs: int):
    """The plain loop's result; many tests ask for the same one."""
    return plain_loop(recipe(), {"kind": kind, "lr": lr}, seed, epochs=epochs)


def check_alone(place: Path, epochs: int = 3) -> None:
    """Every trial finished on the plain loop's bits: state, every loss, every metric."""
    report = shoal.open(place, recipe())
    losses = read_losses(place)
    assert report.trials
    for trial in report.trials:
        assert trial.state == "FINISHED", trial.error or trial
        plain = alone(trial.hp["kind"], trial.hp["lr"], trial.seed, epochs)
        assert_same(plain, trial, losses=losses[trial.number])
