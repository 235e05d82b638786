"""Stages on GPUs, without a study: NCCL where each has one of its own, else through the host."""

from __future__ import annotations

import pytest
import torch
from pipelining import LR, sequence

from shoal.pipeline.run import run_stages
from shoal.testing import compare, plain_2bw_loop, plain_loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def train_and_compare(stages, schedule, processes):
    how = {"steps": 4, "device": "cuda"}
    recipe = sequence(4, clip_grad_norm=0.1)
    run = {"stages": stages, "schedule": schedule, "processes": processes, "hang_s": 120}
    trained = run_stages(recipe, LR, 5, **run, **how)
    loop = plain_2bw_loop if schedule == "2bw" else plain_loop
    plain = loop(recipe, LR, 5, **how)
    found = compare(plain, trained.state, losses=trained.losses)
    assert found.equal, found.first_difference
    return trained.carried


@pytest.mark.parametrize("schedule", ["flush", "zb-h1", "2bw"])
@pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not torch.distributed.is_nccl_available(),
    reason="needs two CUDA devices and NCCL",
)
def test_nccl_carries_what_lies_on_gpus(schedule, stage_processes):
    assert train_and_compare(2, schedule, stage_processes) == "nccl, from device to device"


def test_two_stages_on_one_gpu_send_host_memory_and_say_why(stage_processes):
    stages = torch.cuda.device_count() + 1
    if stages > stage_processes.most:
        pytest.skip(f"{stages} stages need as many processes")
    said = train_and_compare(stages, "flush", stage_processes)
    assert said.startswith("gloo, through host memory: ranks 0 and ")
