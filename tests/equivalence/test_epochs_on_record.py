"""How many epochs a trial trained is asked of its own steps, where studies go on."""

from __future__ import annotations

import squads
import torch
from torch import nn

import shoal


def test_a_trial_that_went_on_is_verified_to_its_last_epoch(tmp_path, warm_workers):
    """Its steps were the last ones of a run once, and are not those of the next run."""
    rows = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    recipe = shoal.Recipe(
        model=lambda hp: nn.Linear(8, 1),
        data=lambda hp: (list(rows.split(4)), None),
        inputs=lambda batch: (batch,),
        loss=lambda output, batch: (output - batch.sum(1, keepdim=True)).square().mean(),
    )
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    for rates, epochs in (([0.01], 2), ([0.01, 0.02], 4)):
        study = shoal.Study(
            "epochs", recipe, space=shoal.grid(lr=rates), epochs=epochs, directory=tmp_path
        )
        options = {"technique": "resident", "workers": warm_workers, "progress": False}
        report = study.run(hardware=hardware, **options)
    squads.assert_verified(report, recipe)
