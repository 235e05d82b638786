"""Frames that go from device to device, by turns: the code of NCCL, over gloo, to its bits."""

from __future__ import annotations

import pytest
import traps
from pipelining import LR, assert_alike, sequence, trap

from shoal.core.errors import SpecError
from shoal.pipeline.run import run_stages


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        (trap(traps.Chain, 5, clip_grad_norm=0.01), {"stages": 4, "schedule": "2bw", "steps": 5}),
        (trap(traps.Structured, 2), {"stages": 2, "schedule": "zb-h1"}),
        (trap(traps.SharedLayer, 3), {"stages": 3, "schedule": "flush"}),
    ],
    ids=["dropout and clipping", "structures", "ties"],
)
def test_frames_between_devices_change_no_bit(recipe, how, stage_processes):
    trained = assert_alike(recipe, LR, stage_processes, direct=True, **how)
    assert trained.carried == "gloo, from device to device"


def test_copies_send_each_other_gradients_between_devices(stage_processes):
    how = {"stages": 2, "width": 2, "schedule": "flush"}
    assert_alike(sequence(4, clip_grad_norm=0.1), LR, stage_processes, direct=True, **how)


def test_by_the_host_unless_asked_on_cpus(stage_processes):
    trained = assert_alike(sequence(2), LR, stage_processes, stages=2, steps=1)
    assert trained.carried == "gloo, through host memory"


@pytest.mark.parametrize(
    ("device", "said"),
    [("cuda", "torch sees no CUDA device in this process"), ("tpu", "'cpu' or 'cuda', got 'tpu'")],
)
def test_a_device_that_is_not_there_is_refused(device, said, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SpecError, match=said):
        run_stages(sequence(2), LR, 0, steps=1, stages=2, device=device)
