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


@pytest.mark.parametrize(
    ("ranks", "stages", "width", "schedule", "way"),
    [
        (2, 2, 1, "flush", "direct"),
        pytest.param(2, 2, 1, "2bw", "host", marks=pytest.mark.full),
        pytest.param(4, 2, 2, "zb-h1", "direct", marks=pytest.mark.full),
    ],
)
def test_every_rank_has_the_plain_bits(ranks, stages, width, schedule, way):
    ended = launch(ranks, stages, width, schedule, way)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("EQUAL") == ranks


@pytest.mark.full
def test_another_number_of_ranks_is_refused():
    ended = launch(2, 3, 1, "flush", "host")
    assert ended.returncode
    words = "the pipeline takes 3 processes, one for each stage of each copy, and 2 were started"
    assert words in ended.stderr
    assert "EQUAL" not in ended.stdout


def test_a_group_that_cannot_carry_messages_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:mpi,cuda:mpi")
    with pytest.raises(SpecError, match="uses 'mpi'"):
        launched.run_launched(lambda rank: None, 2, hang_s=1)


@pytest.mark.parametrize(
    ("backends", "device", "has_own"),
    [
        ("cpu:gloo,cuda:gloo", "cpu", False),
        ("cpu:gloo,cuda:nccl", "cpu", True),
        ("cuda:nccl", "cuda", True),
    ],
)
def test_a_group_of_nccls_is_gone_along_with_by_one_of_gloos(
    backends, device, has_own, monkeypatch
):
    made = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "new_group", lambda **how: made.append(how["backend"]) or "group")
    monkeypatch.setattr(dist, "barrier", lambda group: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    launched._require(2)
    assert launched.device_of_group() == device
    with launched._host_group(1) as host:
        assert host == ("group" if has_own else None)
    assert made == (["gloo"] if has_own else [])
