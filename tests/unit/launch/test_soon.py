"""What is done while workers import torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.launch import run
from shoal.runtime.pool import WorkerPool


class Packing(Exception):
    pass


def test_workers_start_before_the_recipe_is_packed(tmp_path, monkeypatch):
    told = []

    def packed(*_):
        told.append("packed")
        raise Packing

    monkeypatch.setattr(WorkerPool, "warm", lambda pool, count: told.append(f"{count} started"))
    monkeypatch.setattr(run, "refuse_early", packed)
    study = shoal.Study(
        "soon",
        shoal.Recipe(
            model=lambda hp: nn.Linear(2, 1),
            data=lambda hp: ([(torch.ones(4, 2),)], None),
            loss=lambda output, batch: output.sum(),
        ),
        space=shoal.grid(lr=[0.1, 0.2]),
        steps=1,
        metric="train_loss",
        directory=tmp_path,
    )
    hardware = shoal.Hardware.virtual(devices=2, memory="1MiB")
    with pytest.raises(Packing):
        study.run(hardware=hardware, progress=False)
    assert told == ["2 started", "packed"]
