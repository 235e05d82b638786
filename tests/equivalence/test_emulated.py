"""Trials on emulated devices end on the bits of the plain loop: only their time is made up."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal

STEPS = 4


def _model(hp):
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 1))


def _data(hp):
    x_BF = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    return list(zip(x_BF.split(6), x_BF.sum(1, keepdim=True).split(6), strict=True)), None


def _loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["device", "host"])
def test_an_emulated_device_trains_to_the_bits_of_the_plain_loop(
    optimizer, precision, tmp_path, warm_workers, assert_alone
):
    recipe = shoal.Recipe(
        model=_model, data=_data, loss=_loss, clip_grad_norm=1.0, precision=precision
    )
    study = shoal.Study(
        "emulated", recipe, space=shoal.grid(lr=[1e-2, 3e-2]), steps=STEPS, directory=tmp_path
    )

    report = study.run(
        hardware=shoal.Hardware.emulated("h200", memory="8MiB", scale=50, poison=True),
        technique=shoal.Spilled(shards=3, optimizer=optimizer),
        progress=False,
        workers=warm_workers,
    )

    assert_alone(report, report.trials, recipe, steps=STEPS)
