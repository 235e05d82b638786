"""Trials of one worker that share their data train to the bits of training alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal

STEPS, TRIALS = 14, 9


def model(hp):
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 3))


def noted(log):
    with Path(log).open("a") as file:
        file.write(f"{os.getpid()}\n")


def dataset(count, by=1.0):
    draws = torch.Generator().manual_seed(2)
    x = torch.randn(count, 6, generator=draws) * by
    return TensorDataset(x, torch.randint(3, (count,), generator=draws))


def same_for_all(hp, log):
    noted(log)
    return DataLoader(dataset(30), 8, shuffle=True), DataLoader(dataset(7), 7)


def by_two(hp, log):
    noted(log)
    by = 1.0 if hp["lr"] < 0.05 else 2.0
    return DataLoader(dataset(30, by), hp["batch"], shuffle=True), None


def recipe(data, log):
    return shoal.Recipe(
        model=model,
        data=lambda hp: data(hp, log),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        share_data=True,
    )


def space(**more):
    return {"lr": shoal.uniform(0.01, 0.1), **more}


@pytest.mark.parametrize("fuse", [False, 4])
def test_a_worker_makes_data_twice_for_all_its_trials(fuse, tmp_path, run_study, assert_alone):
    """Beside each other on two devices, in leases and epochs that begin at different steps."""
    log = tmp_path / "calls"
    one = recipe(same_for_all, str(log))
    report = run_study(one, space(), trials=TRIALS, steps=STEPS, devices=2, fuse=fuse)
    made = log.read_text().split()
    assert max(made.count(process) for process in set(made)) == 2
    if not fuse:
        assert_alone(report, report.trials, one, steps=STEPS)
    else:
        assert [t.error for t in report.trials] == [""] * TRIALS


def test_trials_that_read_other_hyperparameters_have_data_of_their_own(
    tmp_path, run_study, assert_alone
):
    log = tmp_path / "calls"
    one = recipe(by_two, str(log))
    options = {"batch": shoal.choice(5, 8)}
    report = run_study(
        one, space(**options), trials=TRIALS, steps=STEPS, devices=1, metric="train_loss"
    )
    assert len(log.read_text().split()) > 2 * TRIALS
    assert_alone(report, report.trials, one, steps=STEPS)
