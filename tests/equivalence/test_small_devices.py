"""A model of any size trains on one small device."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import shoal
from shoal.core.event import PeakMeasured

WIDTH, BLOCKS, STEPS = 48, 112, 3


class Tower(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tower(hp):
    return Tower(hp["blocks"])


def rows(hp):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2, WIDTH, generator=generator), torch.tensor([0, 2])) for _ in range(STEPS)
    ], None


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


LONG = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("place", "times", "blocks", "precision"),
    [
        pytest.param("device", 48, BLOCKS, "fp32", marks=LONG),
        pytest.param("device", 48, BLOCKS, "bf16", marks=LONG),
        ("host", 64, BLOCKS, "fp32"),
        pytest.param("host", 64, BLOCKS, "bf16", marks=pytest.mark.full),
        ("host", 12, BLOCKS // 5, "bf16"),
    ],
)
def test_a_state_of_many_times_the_device_trains_exactly(
    place, times, blocks, precision, run_study, assert_alone
):
    tensors = Tower(blocks).parameters()
    state = 16 * sum(p.numel() for p in tensors)  # with AdamW's moments
    budget = state // times
    recipe = shoal.Recipe(
        model=tower, data=rows, loss=loss, clip_grad_norm=0.5, precision=precision
    )
    peaks = []

    def note(event):
        if isinstance(event, PeakMeasured):
            peaks.append(event.peak_bytes)

    report = run_study(
        recipe,
        shoal.grid(lr=[1e-2, 3e-3], blocks=[blocks]),
        steps=STEPS,
        memory=budget,
        technique=shoal.Spilled(optimizer=place) if place == "device" else None,
        callbacks=[note],
    )
    assert_alone(report, report.trials, recipe, steps=STEPS)
    assert 0 < max(peaks) <= budget


def views(hp):
    """Rows of a data set that is far larger than the device."""
    x = torch.randn(40_000, WIDTH, generator=torch.Generator().manual_seed(1))
    return list(
        zip(x[: 2 * STEPS].split(2), x[:, 0].long().clamp(0, 2).split(2), strict=False)
    ), None


@pytest.mark.sample(1)
@pytest.mark.parametrize("technique", [None, shoal.Spilled(shards=4), shoal.Spilled(shards=8)])
def test_batches_that_are_views_of_a_large_data_set(technique, run_study, assert_alone):
    recipe = shoal.Recipe(model=tower, data=views, loss=loss)
    told = []
    report = run_study(
        recipe,
        shoal.grid(lr=[1e-2], blocks=[8]),
        steps=STEPS,
        memory="1MiB",
        technique=technique,
        callbacks=[told.append],
    )
    assert_alone(report, report.trials, recipe, steps=STEPS)
    peaks = [event for event in told if isinstance(event, PeakMeasured)]
    assert all(peak.peak_bytes <= peak.predicted_bytes for peak in peaks)


def many_rows(hp):
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(64) % 3
    return [(torch.randn(64, WIDTH, generator=generator), labels) for _ in range(STEPS)], None


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "technique",
    [
        shoal.Spilled(shards=5, optimizer="host"),
        shoal.Spilled(shards=3, recompute=False),
        shoal.Spilled(shards=8, optimizer="device", keep=(0,)),
    ],
)
def test_what_shards_are_said_to_need_is_enough_to_train(technique, run_study, assert_alone):
    recipe = shoal.Recipe(model=tower, data=many_rows, loss=loss)
    asked = {"recipe": recipe, "space": {"lr": 1e-2, "blocks": 10}, "steps": STEPS, "trials": 1}
    with pytest.raises(shoal.PlanError, match=r"asked to train in \d shards") as refused:
        run_study(**asked, memory="24KiB", technique=technique)
    least = re.search(r"needs ([\d.]+ \w+) or more", str(refused.value))[1].replace(" ", "")
    report = run_study(**asked, memory=least, technique=technique)
    assert_alone(report, report.trials, recipe, steps=STEPS)
