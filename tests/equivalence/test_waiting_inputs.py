"""Inputs of an array's shards that wait on the host, where a slot fails meanwhile."""

from __future__ import annotations

import pytest
import squads
import torch
from torch import nn

import shoal
from shoal.core.technique import Spilled
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.spill.generate import route_of

WIDTH = 8
ONE_SLOT = {"keep": (), "boundaries": "host", "lookahead": 0, "lookbehind": 0}
WAYS = {
    "one slot": Spilled(shards=6, optimizer="device", **ONE_SLOT),
    "two slots": Spilled(shards=7, optimizer="host", keep=(), boundaries="host"),
}


class Block(nn.Module):
    """One that is ``wary`` raises where it is given what is not finite, for all slots at once."""

    def __init__(self, wary: bool) -> None:
        super().__init__()
        self.enter, self.drop = nn.Linear(WIDTH, WIDTH).double(), nn.Dropout(0.1)
        self.wary = wary

    def forward(self, x):
        x = self.drop(self.enter(x)).tanh()
        if self.wary:
            x = x @ torch.linalg.cholesky(x.T @ x + torch.eye(WIDTH, dtype=x.dtype))
        return x


class Skipping(nn.Module):
    """Its last layers read what its first ones make, which stays on the device."""

    def __init__(self, hp) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(index == 2) for index in range(8))
        self.head = nn.Linear(WIDTH, squads.CLASSES).double()

    def forward(self, x):
        made = []
        for index, block in enumerate(self.blocks):
            x = block(x + made[7 - index] if index > 4 else x)
            made.append(x)
        return self.head(x)


def straight(hp):
    """Nothing but the input of each shard."""
    return nn.Sequential(*(Block(index == 2) for index in range(7)), nn.Linear(WIDTH, 3).double())


def data(hp):
    """The fourth batch is what the trial says: ``bad`` or short."""
    random, batches = torch.Generator().manual_seed(5), []
    for index in range(8):
        count = 2 if hp["fourth"] == "short" and index == 3 else 4
        x = torch.randn(count, WIDTH, generator=random, dtype=torch.float64)
        batches.append((x, torch.randint(squads.CLASSES, (count,), generator=random)))
    if hp["fourth"] == "bad":
        batches[3][0].fill_(torch.nan)
    return batches, None


@pytest.fixture
def run_with(run_study, jobs):
    """Run such trials, two of each; the bad ones fail by their code, and others see nothing."""

    def run(fourth, model, way, accumulate):
        of = squads.recipe(model=model, data=data, accumulate=accumulate)
        space = shoal.grid(fourth=fourth, lr=[0.01, 0.003])
        loop, width = {"steps": 6 // accumulate + 1}, 2 * len(fourth)
        report = run_study(of, space, fuse=width, technique=WAYS[way], poison=True, **loop)
        assert route_of(jobs[0].technique, jobs[0].shards).away
        rows = Snapshot.of(read_outline(report.directory)).trials
        assert {row.technique for row in rows} == {"Spilled"}
        bad = [trial for trial in report.trials if trial.hp["fourth"] == "bad"]
        assert all("cholesky" in trial.error_line for trial in bad)
        alive = [trial for trial in report.trials if trial not in bad]
        squads.assert_arrayed(report, alive, of, width, **loop)

    return run


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_that_fails_is_nothing_to_those_whose_inputs_come_back(way, accumulate, run_with):
    """What it left on the host raises for all slots, if it comes back as it was."""
    run_with(["good", "bad"], straight, way, accumulate)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_where_all_that_run_together_fail_one_by_itself_goes_on(way, accumulate, run_with):
    run_with(["short", "bad"], Skipping, way, accumulate)
