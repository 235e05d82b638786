"""Forwards that train what was frozen: an array has no gradients for it, and says so."""

from __future__ import annotations

import pytest
import ranks
import torch
from companies import member_of
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.fusion import Array, Declined, LoopBackend
from shoal.fusion.graphs.branches import BranchesBackend
from shoal.fusion.passes.fused import StackedBackend
from shoal.recipes.recipe import Recipe

STEPS = 3  # that the frozen layer is frozen for


class Unfreezing(nn.Module):
    """Counts in a buffer, which an array may, and trains its first layer after some steps."""

    def __init__(self, width: int, *, by_setting: bool, disagrees: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, width, dtype=torch.float64).requires_grad_(False)
        self.last = nn.Linear(width, 2, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.by_setting, self.disagrees = by_setting, disagrees

    def forward(self, x):
        if self.training:
            self.count += 1
            if self.count.item() > STEPS:
                self._unfreeze()
        if self.disagrees and x.sum() > 0:  # and so its part runs slot by slot
            x = x + 0.0
        return self.last(self.first(x).tanh())

    def _unfreeze(self) -> None:
        for parameter in self.first.parameters():
            if self.by_setting:
                parameter.requires_grad = True
            else:
                parameter.requires_grad_()


def part(hp):
    whole = Unfreezing(16, by_setting=hp["by_setting"], disagrees=hp["disagrees"])
    return nn.Sequential(whole, nn.Linear(2, 2, dtype=torch.float64))


def data(hp):
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(zip(x.split(2), (x.sum(1) > 0).long().split(2), strict=True)), None


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sgd(named, hp):
    return torch.optim.SGD([p for _, p in named], lr=0.1)


RECIPE = Recipe(model=part, data=data, loss=loss, optimizer=sgd)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("backend", [StackedBackend, LoopBackend, BranchesBackend])
@pytest.mark.parametrize("disagrees", [False, True])
@pytest.mark.parametrize("by_setting", [False, True])
def test_the_step_of_an_array_that_would_leave_it_frozen_is_declined(
    by_setting, disagrees, backend
):
    hp = {"by_setting": by_setting, "disagrees": disagrees}
    members = [member_of(RECIPE, hp, seed) for seed in range(3)]
    array, batches = Array(members, backend=backend()), data(hp)[0]
    for step in range(STEPS):
        found = array.step([batches[step], batches[step + 1], batches[step + 2]])
        assert not found.failures
    with pytest.raises(Declined, match="were frozen or unfrozen while it trained"):
        array.step(batches[:3])


def wide(hp):
    """Its first layer is the base of an array of these."""
    return Unfreezing(32768, by_setting=False, disagrees=False)


@pytest.mark.parametrize("fuse", ["2-eager", "2-branches"])
def test_in_a_study_its_trial_fails_at_that_step_as_it_does_alone(fuse, run_study):
    of = shoal.Recipe(model=wide, data=data, loss=loss, optimizer=sgd)
    for fused in (fuse, False):
        report = run_study(of, shoal.grid(lr=[0.1, 0.2], seed=[0]), steps=6, fuse=fused)
        for trial in report.trials:
            assert trial.error_line.startswith("unfreeze 'first.weight' in the schedule")
        assert [row.step for row in ranks.rows_of(report.directory)] == [STEPS] * 2
