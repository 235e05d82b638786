"""Trials with a parameter that has no dimensions, in an array that is interrupted."""

from __future__ import annotations

from signal import SIGTERM, raise_signal

import pytest
import squads
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.event import StepFinished


class Scaled(nn.Module):
    """With a learned temperature, all of whose optimizer's state are numbers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = block(x).tanh()
        return x


def data(hp):
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sin()), batch_size=8, shuffle=True), None


def squares(output, batch):
    return (output - batch[1]).square().mean()


class StopAtStep:
    """Once a trial has come so far."""

    def __init__(self, step):
        self.step = step

    def __call__(self, event):
        if isinstance(event, StepFinished) and event.step == self.step:
            raise_signal(SIGTERM)


@pytest.mark.parametrize("technique", [None, shoal.Spilled(shards=2)], ids=["whole", "in shards"])
def test_what_adam_keeps_of_it_is_saved(technique, tmp_path, warm_workers):
    recipe = shoal.Recipe(model=lambda hp: Scaled(), data=data, loss=squares)
    space = shoal.grid(lr=[1e-2, 2e-2])
    ends = {"steps": 12, "metric": "train_loss", "checkpoint_every": 0}
    study = shoal.Study("scaled", recipe, space=space, directory=tmp_path, **ends)
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    options = {"hardware": hardware, "technique": technique, "fuse": "2-eager"}

    def go_on(**more):
        return study.run(progress=False, workers=warm_workers, **options, **more)

    with pytest.raises(SystemExit):
        go_on(callbacks=[StopAtStep(3)])
    report = go_on()
    squads.assert_arrayed(report, report.trials, recipe, 2, steps=12)
