"""A program for a GPU: two spilled trials beside the plain loop; prints what came of them as JSON.

Arguments: where the optimizer steps, and the budget of cuda:0.
"""

import json
import os
import sys
import tempfile

import torch
from torch import nn

import shoal
from shoal.core.event import PeakMeasured
from shoal.testing import compare, plain_loop

STEPS = 5


def model(hp):
    hidden = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Dropout(0.1), nn.Linear(1024, 10))


def data(hp):
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 1024, generator=draws), torch.randint(10, (64,), generator=draws)
    return list(zip(x.split(16), y.split(16), strict=True)), None


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def main(place, budget):
    recipe = shoal.Recipe(model=model, data=data, loss=loss, clip_grad_norm=1.0)
    peaks = []
    with tempfile.TemporaryDirectory() as folder:
        study = shoal.Study(
            "two", recipe, space=shoal.grid(lr=[1e-3, 1e-2]), steps=STEPS, directory=folder
        )
        report = study.run(
            hardware=shoal.Hardware.parse("cuda:0", budget, threads=1),
            technique=shoal.Spilled(optimizer=place),
            callbacks=[lambda event: peaks.append(event) if type(event) is PeakMeasured else None],
            progress=False,
        )
        found = [differs(recipe, trial, place) for trial in report.trials]
    told = {"differs": found, "peak": max(p.peak_bytes for p in peaks)}
    sys.stdout.write(json.dumps(told | {"budget": peaks[0].budget_bytes}) + "\n")


def differs(recipe, trial, place):
    """From the plain loop, in words; on a GPU that has no room for one nobody knows."""
    if trial.error:
        return trial.error
    try:
        plain = plain_loop(
            recipe, trial.hp, trial.seed, steps=STEPS, device="cuda", optimizer=place
        )
    except torch.OutOfMemoryError:
        return "no room for the plain loop"
    return compare(plain, trial.load_state()).first_difference


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # autograd's thread may meet an interpreter that is being taken down
