"""A study whose trials train in arrays, and get other seats as others are pruned.

Imported by tests and, by this name, by worker processes and by the files that ``Runner`` writes.
"""

from __future__ import annotations

import functools

import studies
import torch
from torch import nn

import shoal
from shoal.core.seats import epochs_of
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.testing import array_loop, assert_same, compare, plain_loop
from shoal.verify import read_losses, verify_trials

EVERY, STEPS, TRIALS = 4, 4 * 9, 12
FUSE = "4/2/1"


class Net(nn.Module):
    """Statistics and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.leave = nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x):
        if studies.is_worker():
            studies.wait()
        return self.leave(self.drop(torch.tanh(self.norm(self.enter(x)))))


def build(hp):
    return Net()


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
    return shoal.Recipe(model=build, data=data, loss=loss)


def make(directory, *, name="k", **options) -> shoal.Study:
    usual = {"trials": TRIALS, "generation": TRIALS, "pruner": "asha", "seed": 3}
    usual |= {"steps": STEPS, "eval_every": EVERY, "space": {"lr": shoal.log_uniform(1e-4, 1e-1)}}
    usual |= {"metric": "valid_loss"}
    return shoal.Study(name, recipe(), directory=directory, **(usual | options))


def rows_of(place):
    return Snapshot.of(read_outline(place)).trials


def outcome(place):
    """All that must not depend on who was quicker, or on what was killed."""
    losses = read_losses(place)
    return [
        (r.number, str(r.state), r.step, r.numerics["array"], losses[r.number])
        for r in rows_of(place)
    ]


@functools.cache
def alone(lr: float, seed: int, steps: int, told: str):
    """The trial in its seats, with nobody beside it."""
    epochs, hp, loop = epochs_of({"array": told}), {"lr": lr}, {"eval_every": EVERY}
    if not epochs:
        return plain_loop(recipe(), hp, seed, steps=steps, **loop)
    (_, slot, width, *_), *later = epochs
    seat = {"slot": slot, "width": width, "later": later}
    return array_loop(recipe(), hp, seed, steps=steps, **seat, **loop)


def check(place) -> None:
    """Each trial, pruned ones too, has the bits of its epochs."""
    report, losses = shoal.open(place, recipe()), read_losses(place)
    for row, trial in zip(rows_of(place), report.trials, strict=True):
        plain = alone(row.hp["lr"], row.seed, row.step, row.numerics["array"])
        assert_same(plain, trial, losses=losses[row.number])


def check_seats(place) -> None:
    """As ``check``, of a study that went on in other seats; and as a user would, by ``verify``.

    Without metrics by the loop: where the study was short there is one evaluation more.
    """
    report, losses, rows = shoal.open(place, recipe()), read_losses(place), rows_of(place)
    for row, trial in zip(rows, report.trials, strict=True):
        if row.numerics.get("array_pass") == "branches":
            continue  # the loop is of stacked passes
        array = row.numerics.get("array", "")
        plain = alone(row.hp["lr"], row.seed, row.step, array)
        found = compare(plain, trial.load_state(), losses=losses[row.number])
        assert found.equal, f"trial {row.number}, {array}: {found.first_difference}"
    verdicts = list(verify_trials(place, rows, recipe=recipe()))
    assert [v.first_difference or v.failure or v.skipped for v in verdicts] == [""] * len(rows)
