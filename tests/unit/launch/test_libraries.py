"""What libraries keep of a device is no trial's, in plans and while trials train."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from torch import nn

import shoal
from shoal.core.event import PeakMeasured
from shoal.core.plan import Plan
from shoal.core.units import Bytes, Seconds
from shoal.launch.plan import without_libraries
from shoal.testing import make_device, make_job, make_shard

MIB = 2**20
OWN = Bytes(3 * MIB)


def gpu(name):
    return replace(make_device(name, 8 * MIB), kind="cuda")


def test_a_gpu_that_nobody_opened_is_taken_to_be_like_the_others():
    hardware = shoal.Hardware(devices=(gpu("cuda:0"), gpu("cuda:1")))
    found = {"cuda:0": Bytes(2 * MIB), "cuda:1": OWN}

    known, idle = without_libraries(hardware, [gpu("cuda:2")], found)

    assert [d.library_bytes for d in known.devices] == [2 * MIB, 3 * MIB]
    assert [d.for_trials for d in known.devices] == [6 * MIB, 5 * MIB]
    assert [d.library_bytes for d in idle] == [3 * MIB]


def test_virtual_devices_are_as_they_were():
    hardware = shoal.Hardware.virtual(devices=2, memory="8MiB")

    assert without_libraries(hardware, (), {}) == (hardware, ())


def plan_of(device, **shard):
    job = make_job(0, [make_shard(0, 2**10, **shard)])
    return Plan(study="s", devices=(device,), jobs=(job,), active=1, seconds=Seconds(1.0))


def test_a_plan_names_what_libraries_keep_and_what_kernels_take():
    plan = plan_of(replace(gpu("cuda:0"), library_bytes=OWN), workspace_bytes=Bytes(2048))

    assert "device cuda:0: of 8.0 MiB, 3.0 MiB are the libraries' own" in plan.explain()
    assert "workspace of kernels 2.0 KiB" in plan.explain()
    assert json.loads(plan.to_json())["devices"][0]["library_bytes"] == OWN
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_for_cpus_says_nothing_of_either():
    plan = plan_of(make_device())

    assert "libraries" not in plan.explain()
    assert "workspace" not in plan.explain() + plan.to_json()
    assert "library_bytes" not in plan.to_json()
    assert Plan.from_json(plan.to_json()) == plan


def _model(hp):
    blocks = [nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(nn.Linear(8, 96), *blocks, nn.Linear(96, 1))


def _data(hp):
    x_BF = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    return list(zip(x_BF.split(6), x_BF.sum(1, keepdim=True).split(6), strict=True)), None


def _loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])


RECIPE = shoal.Recipe(model=_model, data=_data, loss=_loss)


REST = 500 * 2**10


def _study(directory):
    return shoal.Study(
        "libraries",
        RECIPE,
        space=shoal.grid(lr=[1e-2]),
        steps=3,
        metric="train_loss",
        directory=directory,
    )


def _hardware(own):
    device = replace(make_device("cpu:0", REST + OWN), library_bytes=Bytes(own))
    return shoal.Hardware(devices=(device,))


def test_trials_have_the_rest_and_end_on_the_bits_of_the_plain_loop(
    tmp_path, warm_workers, assert_alone
):
    told = []
    everything = _study(tmp_path / "all").plan(hardware=_hardware(0), workers=warm_workers)
    study = _study(tmp_path / "rest")
    planned = study.plan(hardware=_hardware(OWN), workers=warm_workers)
    report = study.run(
        hardware=_hardware(OWN), callbacks=[told.append], progress=False, workers=warm_workers
    )
    peak = [event for event in told if isinstance(event, PeakMeasured)][-1]

    assert everything.jobs[0].peak_bytes > REST
    assert not isinstance(everything.jobs[0].technique, shoal.Spilled)
    assert isinstance(planned.jobs[0].technique, shoal.Spilled)
    assert_alone(report, report.trials, RECIPE, steps=3)
    assert OWN < peak.peak_bytes <= peak.predicted_bytes <= REST + OWN
    assert peak.budget_bytes == REST + OWN
