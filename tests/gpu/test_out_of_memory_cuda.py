"""A GPU that really has no room: what was there goes, and the trial goes on smaller."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import troubles
from listening import Heard
from torch import nn

import shoal
from shoal.core.event import TrialReplanned, TrialRestarted
from shoal.core.spec import TrialSpec
from shoal.core.units import Bytes
from shoal.device import open_device
from shoal.device.allocator import allocator_here, held_by_libraries
from shoal.runtime.measuring.measure import Measurer
from shoal.runtime.wire.messages import Measure, Refused
from shoal.runtime.worker import _opened
from shoal.testing import assert_same, plain_loop
from shoal.verify import read_losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
MIB = 2**20
LARGE = 24 * MIB
STEPS = 5


def hardware_of(room):
    """A GPU of which the process may have so much beside what libraries keep, and no more."""
    (spec,) = shoal.Hardware.parse("cuda:0", "1GiB", threads=1).devices
    device, before = open_device(spec), torch.cuda.memory_allocated()
    with device.active():
        own = held_by_libraries(device.torch_device, torch.cuda.memory_allocated) - before
    device.close()
    memory = Bytes(own + room)
    return shoal.Hardware(devices=(replace(spec, memory=memory, share_bytes=memory),))


class Failing(nn.Module):
    """Its forward takes much memory, and raises in its third batch once."""

    def __init__(self, flag):
        super().__init__()
        self.layer, self.flag = nn.Linear(4, 4), Path(flag)

    def forward(self, x):
        much = torch.ones(LARGE // 4, device=x.device)
        if x[0, 0] == troubles.MARK and not self.flag.exists():
            self.flag.touch()
            error = RuntimeError("not now")
            raise error  # which knows this frame, which knows it
        return self.layer(x) * much[0]


def failing(hp):
    return Failing(hp["flag"])


def marked(hp):
    batches = [torch.full((2, 4), float(n)) for n in range(STEPS)]
    batches[2][0, 0] = troubles.MARK
    return [(batch,) for batch in batches], None


def loss(output, batch):
    return output.square().mean()


def run(recipe, space, room, tmp_path, heard, **options):
    known = {"steps": STEPS, "retries": 1, "directory": tmp_path}
    study = shoal.Study("oom", recipe, space=space, **known)
    shown = {"progress": False, "timeline": False, "callbacks": [heard]}
    report = study.run(hardware=hardware_of(room), **shown, **options)
    losses = read_losses(report.directory)
    for trial in report.trials:
        assert not trial.error, trial.error
        plain = plain_loop(recipe, trial.hp, trial.seed, steps=STEPS, device="cuda")
        assert_same(plain, trial, losses=losses[trial.number])


def test_what_a_failed_pass_held_is_free_when_its_trial_begins_again(tmp_path):
    recipe, heard = shoal.Recipe(model=failing, data=marked, loss=loss), Heard()
    space = shoal.grid(lr=[1e-3], flag=[str(tmp_path / "flag")])
    run(recipe, space, LARGE + LARGE // 2, tmp_path, heard)
    assert [event.step for event in heard.of(TrialRestarted)] == [0]
    assert not heard.of(TrialReplanned)


def test_what_was_there_when_measuring_failed_is_free(tmp_path):
    flag = tmp_path / "flag"
    recipe = shoal.Recipe(model=failing, data=lambda hp: (marked(hp)[0][2:], None), loss=loss)
    device = open_device(hardware_of(2 * LARGE).devices[0])
    with device.active():
        before = held_by_libraries(device.torch_device, torch.cuda.memory_allocated)
        trial = TrialSpec(number=0, hp={"lr": 1e-3, "flag": str(flag)}, seed=0)
        order = Measure(trial, cut=False)
        assert isinstance(Measurer(recipe, device).answer(order), Refused)
        assert flag.exists()
        assert torch.cuda.memory_allocated() - before < LARGE
    device.close()


@pytest.mark.skipif("SHOAL_CUDA_STANDIN" not in os.environ, reason="torch takes 2 MiB at a time")
def test_a_trial_that_runs_out_of_memory_in_a_pass_is_planned_smaller(tmp_path):
    recipe, heard = troubles.recipe(), Heard()
    technique = shoal.Spilled(shards=3, lookahead=1, keep=(), keep_turn=0, optimizer="device")
    space = shoal.grid(rows=[128], lr=[0.01])
    run(recipe, space, 480_000, tmp_path, heard, technique=technique)
    assert heard.of(TrialReplanned)


def wide(hp):
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, LARGE // 64), nn.Linear(LARGE // 64, 4))


def test_who_has_left_leaves_his_memory_to_the_next_one(tmp_path):
    """With the weights, gradients and state of two the process would be out of memory."""
    recipe, heard = shoal.Recipe(model=wide, data=marked, loss=loss), Heard()
    space = shoal.grid(lr=[1e-3, 1e-4, 1e-5])
    run(recipe, space, 7 * LARGE // 2, tmp_path, heard, technique="resident", fuse=False)
    assert not heard.of(TrialReplanned)
    assert not heard.of(TrialRestarted)


def test_the_peak_of_a_study_is_none_of_the_one_before():
    device = open_device(hardware_of(4 * LARGE).devices[0])
    with device.active():
        much = torch.empty(2 * LARGE, dtype=torch.uint8, device=device.torch_device)
    del much
    _opened(device)
    with device.active():
        assert allocator_here().peak_bytes - device.spec.library_bytes < LARGE
    device.close()
