"""Stages that torchrun has started: the bits of the plain loop on every rank, or a refusal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from shoal.core.errors import SpecError
from shoal.pipeline import launched

HERE = Path(__file__).parent


def launch(ranks, *words):
    """``launched.py`` on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(HERE / "launched.py"), *map(str, words)]
    paths = [str(HERE.parent.parent / "src"), str(HERE.parent)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stages", "width", "schedule"),
    [
        (2, 2, 1, "flush"),
        pytest.param(2, 2, 1, "2bw", marks=pytest.mark.full),
        pytest.param(4, 2, 2, "zb-h1", marks=pytest.mark.full),
    ],
)
def test_every_rank_has_the_plain_bits(ranks, stages, width, schedule):
    ended = launch(ranks, stages, width, schedule)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("EQUAL") == ranks


@pytest.mark.slow
def test_another_number_of_ranks_is_refused():
    ended = launch(2, 3, 1, "flush")
    assert ended.returncode
    words = "the pipeline takes 3 processes, one for each stage of each copy, and 2 were started"
    assert words in ended.stderr
    assert "EQUAL" not in ended.stdout


def test_a_group_that_cannot_carry_messages_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    with pytest.raises(SpecError, match="uses 'nccl'"):
        launched.run_launched(lambda rank: None, 2, hang_s=1)
