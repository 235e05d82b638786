"""Spilled trials on the stand-in for a GPU: bits, bytes, blocks, models larger than the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
from standin import can_build  # noqa: E402

pytestmark = [
    pytest.mark.timeout(600),  # the first of all builds the extension
    pytest.mark.skipif(not can_build(), reason="needs g++, ninja and a torch without CUDA"),
]

MIB = 2**20


def run(place, budget, memory, program="spilled.py"):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT / "src")]),
        "SHOAL_CUDA_STANDIN": "1",
        "SHOAL_CUDA_STANDIN_ORDER": "1",
        "SHOAL_CUDA_STANDIN_MEMORY": str(memory),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / program), place, budget],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize(("place", "budget"), [("device", "64MiB"), ("host", "48MiB")])
def test_trials_larger_than_their_budget_have_the_plain_bits_and_stay_within_it(place, budget):
    found = run(place, budget, 4096 * MIB)

    assert found["differs"] == ["", ""]
    assert found["peak"] <= found["budget"]


@pytest.mark.slow
def test_a_model_whose_state_is_larger_than_the_gpu_is_measured_there_layer_by_layer():
    found = run("host", "48MiB", 95 * MIB)  # its state is 128 MiB

    assert found["differs"] == ["", ""]
    assert found["peak"] <= found["budget"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "budget"),
    [("device", "64MiB"), pytest.param("host", "48MiB", marks=pytest.mark.full)],
)
def test_a_step_asks_for_the_blocks_of_the_one_before_and_pins_nothing(place, budget):
    """So torch's allocator, which keeps what it had, has nothing to ask the driver for."""
    first, second, *others = run(place, budget, 4096 * MIB, "steady.py")["steps"]

    assert first[2] == 0
    assert second[2] == 0
    assert others == [second] * 6


@pytest.mark.full
def test_what_the_plain_loop_has_no_room_for_trains():
    found = run("device", "64MiB", 95 * MIB)

    assert found["differs"] == ["no room for the plain loop"] * 2
