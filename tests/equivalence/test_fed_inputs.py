"""``Recipe(inputs=...)`` that draws and decides is run slot by slot, and the models as one."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import squads
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.arraykeys import INPUTS, LOOPED, LOSS
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot

SPACE = shoal.grid(lr=[1e-2, 1e-3, 3e-3])


def model(hp):
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)]
    return nn.Sequential(*layers).double()


def data(hp):
    source = torch.Generator().manual_seed(1)
    x = torch.randn(40, 8, generator=source).double()
    rows = TensorDataset(x, torch.randint(4, (40,), generator=source))
    return DataLoader(rows, batch_size=8, shuffle=True), DataLoader(rows, 16)


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def mixed(batch):
    """Rows with others, by NumPy's number."""
    part, order = np.random.beta(0.4, 0.4), torch.randperm(len(batch[0]))
    return (part * batch[0] + (1 - part) * batch[0][order],)


def mixed_by_torch(batch):
    part = torch.distributions.Beta(0.4, 0.4).sample().item()
    return (part * batch[0] + (1 - part) * batch[0].flip(0),)


def cut(batch):
    """Columns from one that is drawn, or none."""
    x, first = batch[0].clone(), int(torch.randint(0, 6, (1,)))
    if random.random() < 0.7:
        x[:, first : first + 3] = 0
    return {"input": x}


def masked(batch):
    """It decides nothing by what it draws, so that it runs for all slots at once."""
    return (batch[0] * (torch.rand(batch[0].shape) < 0.8),)


def shortened(batch):
    """As many rows as are drawn: others in each slot, mostly."""
    return (batch[0][: int(torch.randint(3, 8, (1,)))],)


def of_some(output, batch):
    return F.cross_entropy(output, batch[1][: len(output)])


def mixed_loss(output, batch):
    """By Python's number, and NumPy's."""
    part, order = random.random(), torch.from_numpy(np.random.permutation(len(output)))
    return part * loss(output, batch) + (1 - part) * F.cross_entropy(output, batch[1][order])


def recipe(**changes):
    return shoal.Recipe(model=model, data=data, **{"loss": loss, **changes})


def keys(report):
    return [dict(row.numerics) for row in Snapshot.of(read_outline(report.directory)).trials]


@pytest.mark.parametrize("kind", ["eager", "traced"])
@pytest.mark.parametrize("inputs", [mixed, mixed_by_torch, cut])
def test_what_draws_and_decides_is_made_for_each_slot(inputs, kind, run_study):
    """Also where slots are filled again; what follows it may be a graph."""
    mine = recipe(inputs=inputs)
    report = run_study(mine, SPACE, epochs=2, fuse=f"2 {kind}")
    assert [key[LOOPED] for key in keys(report)] == [INPUTS] * 3
    assert squads.kinds(report) == [kind] * 3
    squads.assert_near(report.trials, mine, 1e-9, epochs=2)
    squads.assert_verified(report, mine)


@pytest.mark.parametrize("changes", [{"accumulate": 2}, {"precision": "bf16"}], ids=str)
def test_so_it_is_in_micro_batches_and_under_autocast(changes, run_study):
    mine = recipe(inputs=mixed, **changes)
    report = run_study(mine, SPACE, epochs=2, fuse=3)
    assert [key[LOOPED] for key in keys(report)] == [INPUTS] * 3
    squads.assert_verified(report, mine)


def test_what_decides_nothing_is_part_of_the_pass(run_study):
    mine = recipe(inputs=masked)
    report = run_study(mine, SPACE, epochs=2, fuse="3 traced")
    assert not any(LOOPED in key for key in keys(report))
    assert squads.kinds(report) == ["traced"] * 3
    squads.assert_near(report.trials, mine, 1e-9, epochs=2)
    squads.assert_verified(report, mine)


def test_a_loss_that_draws_from_pythons_streams_runs_slot_by_slot(run_study):
    mine = recipe(loss=mixed_loss)
    report = run_study(mine, SPACE, epochs=2, fuse=3)
    assert [key[LOOPED] for key in keys(report)] == [LOSS] * 3
    squads.assert_near(report.trials, mine, 1e-9, epochs=2)
    squads.assert_verified(report, mine)


def test_both_may_be(run_study):
    mine = recipe(inputs=mixed, loss=mixed_loss)
    report = run_study(mine, SPACE, epochs=2, fuse=3)
    assert [key[LOOPED] for key in keys(report)] == [f"{INPUTS}, {LOSS}"] * 3
    squads.assert_near(report.trials, mine, 1e-9, epochs=2)
    squads.assert_verified(report, mine)


def test_inputs_of_other_shapes_in_each_slot_are_no_array(run_study, assert_alone):
    mine = recipe(inputs=shortened, loss=of_some)
    report = run_study(mine, SPACE, epochs=1, fuse=3)
    assert squads.widths(report) == [1] * 3
    assert_alone(report, report.trials, mine, epochs=1)


def test_inputs_that_raise_fail_their_trial_alone(run_study):
    def picky(batch):
        if len(batch[0]) == 8 and np.random.rand() > 0.97:  # a batch to train on
            raise ValueError("no such part")
        return (batch[0] * 1.0,)

    mine = recipe(inputs=picky)
    report = run_study(mine, SPACE, epochs=4, fuse=3)
    alone = run_study(mine, SPACE, epochs=4)
    states = {trial.number: trial.state for trial in alone.trials}
    assert {trial.number: trial.state for trial in report.trials} == states
    assert set(states.values()) == {"FAILED", "FINISHED"}


def test_a_forward_that_begins_to_draw_from_numpy_leaves_its_array(run_study):
    """A late draw, from the one stream that all slots have."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.register_buffer("passes", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.passes += 1
            out = self.layer(x)
            return out * np.random.rand() if self.passes > 16 else out

    mine = dataclasses.replace(recipe(), model=lambda hp: Late().double())
    report = run_study(mine, SPACE, epochs=5, fuse=3)
    squads.assert_near(report.trials, mine, 1e-9, epochs=5)
    squads.assert_verified(report, mine)
