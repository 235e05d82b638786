"""The example of adapters trains spilled and in arrays, and has its base on the disk twice."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.planning import array_place

EXAMPLES = Path(__file__).parents[3] / "examples"
SPACE = {"lr": [1e-3], "rank": [2], "alpha": [4, 8, 16], "seed": [0]}


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("adapters")


@pytest.mark.slow
def test_it_trains_spilled_as_alone_and_the_base_is_on_the_disk_twice(
    adapters: Any, run_study: Any, assert_alone: Any
) -> None:
    technique = shoal.Spilled(shards=3, keep=())
    recipe = adapters.study.recipe
    report = run_study(recipe, shoal.grid(**SPACE), technique=technique, steps=6)

    assert_alone(report, report.trials, recipe, steps=6)
    files = [*report.directory.glob("trials/*/step-*/frozen.safetensors")]
    assert len({file.stat().st_ino for file in files}) <= 2 < len(files)
    fresh = adapters.pretrained().state_dict()
    trained = report.best.load().state_dict()
    assert all(torch.equal(trained[name], fresh[name]) for name in fresh.keys() & trained.keys())


@pytest.mark.full
def test_trials_that_differ_in_their_scale_share_an_array(adapters: Any, run_study: Any) -> None:
    report = run_study(adapters.study.recipe, shoal.grid(**SPACE), fuse=3, steps=4, devices=1)
    rows = Snapshot.of(read_outline(report.directory)).trials
    assert [array_place(row.numerics) for row in rows] == [(0, 3), (1, 3), (2, 3)]
