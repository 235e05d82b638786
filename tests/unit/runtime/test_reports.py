"""What the device loop tells of an emulated device: how well it kept up, without its warm-ups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.core.event import EmulationMeasured, PeakMeasured
from shoal.core.profile import PROFILES
from shoal.core.spec import DeviceSpec
from shoal.core.units import Bytes
from shoal.device import EmulatedDevice, VirtualDevice
from shoal.runtime.reports import Reports
from shoal.testing import ManualClock


@pytest.fixture
def sent():
    return []


def _spec(**settings):
    return DeviceSpec(name="cpu:0", kind="virtual", memory=Bytes(10**6), **settings)


def _events(sent):
    return [event for message in sent for event in message.events]


@pytest.fixture
def device():
    return EmulatedDevice(_spec(profile=PROFILES["h200"]), ManualClock(100.0))


def test_the_emulation_is_told_once_per_stream(device, sent):
    reports = Reports(device, sent.append, timeline=False)
    device.compute(lambda: device.pace.clock.sleep(0.75), seconds=0.5)
    device.compute(lambda: None, seconds=0.25)

    reports.emulation()
    reports.emulation()  # nothing happened since
    reports.send_events()

    (event,) = _events(sent)
    assert isinstance(event, EmulationMeasured)
    assert (event.device, event.stream, event.works) == ("cpu:0", "compute", 2)
    assert event.emulated_s == pytest.approx(0.75)
    assert event.overruns == 1
    assert event.overrun_s == pytest.approx(0.25)
    assert event.behind_s == pytest.approx(0.15)  # more than 0.1 s late is forgiven


def test_a_warm_up_is_left_out(device, sent):
    reports = Reports(device, sent.append, timeline=False)
    device.compute(lambda: device.pace.clock.sleep(9.0), seconds=0.5)

    reports.warmed_up()
    reports.emulation()
    reports.send_events()

    assert _events(sent) == []


def test_a_plain_virtual_device_has_nothing_to_tell(sent):
    reports = Reports(VirtualDevice(_spec()), sent.append, timeline=False)

    reports.emulation()
    reports.warmed_up()
    reports.send_events()

    assert sent == []


def _model(hp):
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 1))


def _data(hp):
    x_BF = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    return list(zip(x_BF.split(6), x_BF.sum(1, keepdim=True).split(6), strict=True)), None


def _loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])


def _told(hardware, directory, workers, steps):
    told = []
    study = shoal.Study(
        "told",
        shoal.Recipe(model=_model, data=_data, loss=_loss),
        space=shoal.grid(lr=[1e-2, 3e-2]),
        steps=steps,
        metric="train_loss",
        directory=directory,
    )
    study.run(
        hardware=hardware,
        technique=shoal.Spilled(shards=3, optimizer="host"),
        callbacks=[told.append],
        progress=False,
        workers=workers,
    )
    assert any(isinstance(event, PeakMeasured) for event in told)
    return [event for event in told if isinstance(event, EmulationMeasured)]


def test_each_lease_on_an_emulated_device_ends_with_how_well_it_kept_up(tmp_path, warm_workers):
    hardware = shoal.Hardware.emulated("h200", memory="8MiB", scale=50)

    told = _told(hardware, tmp_path, warm_workers, steps=4)

    assert {event.stream for event in told} == {"compute", "up", "down", "host"}
    units = sum(event.works for event in told if event.stream == "compute")
    assert 0 < units <= 2 * 3 * 5  # of two trials, three steps, five units; no first step


def test_leases_elsewhere_end_without_it(tmp_path, warm_workers):
    hardware = shoal.Hardware.virtual(devices=1, memory="8MiB")

    assert _told(hardware, tmp_path, warm_workers, steps=2) == []
