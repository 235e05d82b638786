"""Trials of arrays whose others are pruned go on in other seats: to the bits of their epochs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.core.event import StepFinished, TrialReplanned
from shoal.core.seats import ALONE, epochs_of
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.testing import array_loop, assert_same, plain_loop
from shoal.verify import read_losses, verify_trials

EVERY, STEPS = 4, 4 * 9
ENDED = {"FINISHED", "PRUNED"}


class Net(nn.Module):
    """Statistics and masks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(6, width), nn.BatchNorm1d(width)
        self.drop, self.leave = nn.Dropout(0.3), nn.Linear(width, 3)

    def forward(self, x):
        return self.leave(self.drop(torch.tanh(self.norm(self.enter(x)))))


def data(hp):
    draws = torch.Generator().manual_seed(5)
    x = torch.randn(90, 6, generator=draws)
    rows = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
    train, valid = torch.utils.data.random_split(rows, [70, 20], generator=draws)
    shuffled = torch.utils.data.DataLoader(train, 16, shuffle=True)
    return shuffled, torch.utils.data.DataLoader(valid, 20)


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def recipe() -> shoal.Recipe:
    return shoal.Recipe(model=lambda hp: Net(hp.get("width", 8)), data=data, loss=loss)


def make(place, *, trials=12, generation=12, pruner="asha", **more) -> shoal.Study:
    space = {"lr": shoal.log_uniform(1e-4, 1e-1), **more.pop("space", {})}
    return shoal.Study(
        "ranks",
        recipe(),
        space=space,
        trials=trials,
        generation=generation,
        pruner=pruner,
        metric="valid_loss",
        steps=STEPS,
        eval_every=EVERY,
        directory=place,
        seed=3,
        **more,
    )


def run(study, devices=2, fuse="4/2/1", **more):
    hardware = shoal.Hardware.virtual(devices=devices, memory="64MiB")
    study.run(hardware=hardware, fuse=fuse, **more)
    return study


def rows_of(place):
    return Snapshot.of(read_outline(place)).trials


def outcome(place):
    """All that must not depend on who was quicker, or on what was killed."""
    losses = read_losses(place)
    return [
        (r.number, str(r.state), r.step, r.numerics["array"], losses[r.number])
        for r in rows_of(place)
    ]


def check(place) -> None:
    """Each trial, pruned ones too, has the bits of its epochs with nobody beside it."""
    report, losses = shoal.open(place, recipe()), read_losses(place)
    for row, trial in zip(rows_of(place), report.trials, strict=True):
        first, *later = epochs_of(row.numerics)
        told = {"slot": first.slot, "width": first.width, "later": later}
        kind = "eager" if row.numerics.get("array_pass") == "traced" else "eager"
        plain = array_loop(
            recipe(), row.hp, row.seed, steps=row.step, eval_every=EVERY, kind=kind, **told
        )
        assert_same(plain, trial, losses=losses[row.number])


def test_those_that_go_on_fill_narrower_arrays_and_the_last_trains_alone(tmp_path):
    place = run(make(tmp_path)).directory
    rows = rows_of(place)
    assert {str(row.state) for row in rows} == ENDED
    told = {row.number: epochs_of(row.numerics) for row in rows}
    assert [epochs[0][1:] for epochs in told.values()] == [(n % 4, 4) for n in range(12)]
    longest = max(told.values(), key=len)
    assert [epoch.step for epoch in longest] == [0, EVERY, 3 * EVERY]
    assert longest[-1].width == ALONE
    passed = [epochs for epochs in told.values() if len(epochs) > 1]
    assert [epochs[1][1:] for epochs in passed] == [(n, 4) for n in range(4)]
    check(place)
    assert all(v.equal for v in verify_trials(place, rows, recipe=recipe()))
