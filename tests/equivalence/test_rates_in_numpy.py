"""A schedule that computes with numbers of NumPy's, which round otherwise than Python's."""

from __future__ import annotations

import numpy as np
import squads
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import shoal


def test_a_rate_in_numpy_is_multiplied_as_before_after_a_study_went_on(tmp_path, warm_workers):
    """np.float32 times a number of Python's is rounded to np.float32 each time."""
    recipe = shoal.Recipe(
        model=lambda hp: nn.Linear(8, 1),
        data=lambda hp: ([(torch.ones(4, 8), torch.zeros(4, 1))] * 3, None),
        loss=lambda output, batch: (output - batch[1]).square().mean(),
        optimizer=lambda parameters, hp: torch.optim.Adam(parameters, lr=np.float32(1e-3)),
        schedule=lambda optimizer, hp: ExponentialLR(optimizer, 0.93),
    )
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    for steps in (4, 9):
        study = shoal.Study(
            "rate", recipe, space=shoal.grid(seed=[0]), steps=steps, directory=tmp_path
        )
        report = study.run(hardware=hardware, workers=warm_workers, progress=False)
    squads.assert_verified(report, recipe)
