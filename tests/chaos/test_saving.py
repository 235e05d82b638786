"""Generations that are written while their trial raises and is granted again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.runtime.saving import checkpoint
from shoal.testing import plain_loop

STEPS = 8


def data(hp):
    """The disk of the worker is slow from here on: what is written takes a while."""
    if hp["flag"] and os.posix_fallocate.__name__ == "posix_fallocate":
        allocate = os.posix_fallocate

        def slowly(*arguments):
            time.sleep(0.1)
            allocate(*arguments)

        os.posix_fallocate = slowly
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 8, generator=generator), index) for index in range(STEPS)]
    return batches, None


def loss(output, batch):
    flag = Path(loss.flag) if loss.flag else None
    if batch[1] == 5 and flag is not None and not flag.exists():
        flag.touch()
        raise ValueError("once")
    return output.square().mean()


loss.flag = ""


def model(hp):
    loss.flag = hp["flag"]
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4))


RECIPE = shoal.Recipe(model=model, data=data, loss=loss)


@pytest.mark.sample(1)
@pytest.mark.parametrize("technique", ["resident", "spilled"])
def test_a_generation_has_the_bits_of_its_step_though_its_trial_was_granted_again(
    technique, run_study, tmp_path
):
    space = {"lr": 0.05, "flag": shoal.choice(str(tmp_path / "flag"))}
    report = run_study(
        RECIPE,
        space,
        steps=STEPS,
        technique=technique,
        metric="train_loss",
        retries=1,
        checkpoint_every=0,
        keep=50,
    )

    (trial,) = report.trials
    assert trial.state == "FINISHED"
    found = checkpoint.generations(report.directory, 0).all()
    assert len(found) >= STEPS
    for generation in found:
        plain = plain_loop(RECIPE, {"lr": 0.05, "flag": ""}, trial.seed, steps=generation.step)
        weights = checkpoint.read_weights(generation.path)
        for name, tensor in plain.model.state_dict().items():
            assert torch.equal(tensor, weights[name]), f"{name} of {generation.path.name}"
