"""Whose word a plan takes for how fast links are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.bench import (
    Block,
    Disk,
    HostMemory,
    HostOptimizer,
    Kernel,
    Link,
    Machine,
    Measured,
    Rate,
)
from shoal.core.spec import DeviceSpec
from shoal.core.units import Bytes, Seconds
from shoal.planner.price import Price, Speeds
from shoal.planning import speeds as speeds_
from shoal.planning.speeds import HOST_STEP, corrected, speeds_of, why_priced

SAID = Speeds(up_bytes_per_s=8e9, down_bytes_per_s=6e9, source="what somebody said")


def test_a_link_that_is_about_what_it_is_said_to_be_is_left_alone():
    assert corrected(SAID, None) is SAID
    assert corrected(SAID, (4.1e9, 9e9)) is SAID


def test_a_link_far_slower_is_planned_with_as_it_is_and_the_plan_says_so():
    found = corrected(SAID, (1e9, 9e9))
    assert (found.up_bytes_per_s, found.down_bytes_per_s) == (1e9, 6e9)
    assert "measured just now" in found.source
    assert "what somebody said" in found.source
    assert "953.7 MiB/s up" in found.source


def model(hp):
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])


def data(hp):
    return [(torch.ones(2, 64), torch.tensor([0, 1]))] * 2, None


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def test_a_study_whose_links_were_said_to_be_faster_is_planned_with_what_they_are(
    tmp_path, warm_workers, monkeypatch
):
    fast = Speeds(up_bytes_per_s=1e15, down_bytes_per_s=1e15, source="a dream")
    monkeypatch.setattr("shoal.planning.deciding.speeds_of", lambda device: fast)
    recipe = shoal.Recipe(model=model, data=data, loss=loss)
    study = shoal.Study("s", recipe, space={"lr": 0.1}, trials=1, steps=2, directory=tmp_path)
    hardware = shoal.Hardware.virtual(devices=1, memory="150KiB")
    plan = study.plan(hardware=hardware, workers=warm_workers)
    assert type(plan.jobs[0].technique).__name__ == "Spilled"
    assert "far less than a dream" in plan.explain()


def test_a_link_whose_speed_was_given_is_what_it_was_given(tmp_path, warm_workers):
    recipe = shoal.Recipe(model=model, data=data, loss=loss)
    study = shoal.Study("s", recipe, space={"lr": 0.1}, trials=1, steps=2, directory=tmp_path)
    hardware = shoal.Hardware.virtual(devices=1, memory="150KiB", link="1GiB")
    plan = study.plan(hardware=hardware, workers=warm_workers)
    assert speeds_.speeds_of(plan.devices[0]).source in plan.explain()


def rate(best: float) -> Rate:
    return Rate(best=best, median=best, samples=3)


def bench(device: str = "cuda:0", *, gelu_s: float = 4e-4) -> Measured:
    """A GPU whose GELU reads and writes 2**30 bytes, and cores with AdamW at 14 GB/s each."""
    return Measured(
        machine=Machine(cpu="A", cores=8, torch="2", gpus=("B",)),
        taken_at=0.0,
        load=0.0,
        device=device,
        threads=8,
        host=HostMemory(
            copy_one=rate(9e9), copy_all=rate(9e10), triad_one=rate(9e9), triad_all=rate(9e10)
        ),
        link=Link(up=rate(50e9), down=rate(40e9), both=rate(80e9)),
        disk=Disk(write=rate(1e9), read=rate(1e9), direct=True, file_system="ext4"),
        optimizer=HostOptimizer(one=rate(14e9 / 28), all=rate(70e9 / 28)),
        matmuls=(),
        kernels=(
            Kernel(name="gelu", precision="bf16", seconds=1.0, flops=0),
            Kernel(name="gelu", precision="fp32", seconds=gelu_s, flops=0),
        )
        if gelu_s
        else (),
        blocks=(
            Block(
                precision="fp32",
                tokens=8192,
                width=4096,
                heads=32,
                forward_s=1.0,
                backward_s=2.0,
                forward_flops=1,
                backward_flops=2,
            ),
        ),
    )


def device(kind: str = "cuda", **changes: object) -> DeviceSpec:
    return DeviceSpec(name=f"{kind}:0", kind=kind, memory=Bytes(2**30), **changes)


@pytest.mark.parametrize(("threads", "host"), [(1, 14e9), (2, 28e9), (64, 70e9)])
def test_a_step_on_the_host_takes_as_much_longer_as_was_measured(monkeypatch, threads, host):
    monkeypatch.setattr(speeds_, "load", bench)
    found = speeds_of(device(threads=threads))

    assert found.host_step == pytest.approx(2**30 / 4e-4 / host)
    assert (found.up_bytes_per_s, found.down_bytes_per_s) == (50e9, 40e9)
    assert "the link speeds that `shoal bench` measured and" in found.sources
    assert (
        f"{found.host_step:.1f} times as long for an optimizer step on the host" in found.sources
    )
    assert "which `shoal bench` measured" in found.sources


@pytest.mark.parametrize(
    "kept", [None, bench("cpu"), bench(gelu_s=0)], ids=["none", "of a CPU", "without a GELU"]
)
def test_a_step_on_the_host_that_was_not_measured_is_assumed(monkeypatch, kept):
    monkeypatch.setattr(speeds_, "load", lambda: kept)
    found = speeds_of(device())

    assert found.host_step == HOST_STEP
    assert "an assumed 10 times as long for an optimizer step" in found.sources


def test_a_host_is_not_planned_to_step_faster_than_the_gpu(monkeypatch):
    monkeypatch.setattr(speeds_, "load", lambda: bench(gelu_s=1.0))

    assert speeds_of(device()).host_step == 1.0


PRICE = Price(Seconds(1.0), busy=0.5, work_s=Seconds(3.0))


@pytest.mark.parametrize(
    ("devices", "cores", "seconds"),
    [(1, 1, 3.0), (2, 2, 3.0), (4, 2, 3.0), (1, 2, 1.5), (2, 8, 1.0)],
)
def test_copies_and_host_steps_are_hidden_by_cores_that_no_device_has(devices, cores, seconds):
    assert PRICE.on_cores([device("virtual")] * devices, cores) == pytest.approx(seconds)


@pytest.mark.parametrize("hides", [{"kind": "cuda"}, {"link_bytes_per_s": 1e9}], ids=str)
def test_a_device_that_computes_by_itself_hides_them(hides):
    assert PRICE.on_cores([device(**({"kind": "virtual"} | hides))], 1) == 1.0


def test_a_plan_says_what_a_step_takes_where_cores_do_all_of_it():
    words = why_priced(PRICE, Seconds(3.0), 1, SAID)
    assert "a step takes 1.0 s, 3.0 s with its copies and host steps on the same cores" in words
    assert "same cores" not in why_priced(PRICE, Seconds(1.0), 1, SAID)


@pytest.mark.parametrize("kept", [None, bench(), bench("cpu")])
def test_a_virtual_device_steps_on_the_host_it_was_measured_on(monkeypatch, kept):
    monkeypatch.setattr(speeds_, "load", lambda: kept)
    found = speeds_of(device("virtual"))

    assert found.host_step == 1.0
    assert found.sources == found.source
    assert (found.up_bytes_per_s == 50e9) == (kept is not None and kept.device == "cpu")


def test_a_slower_link_leaves_what_was_measured_of_steps(monkeypatch):
    monkeypatch.setattr(speeds_, "load", bench)
    said = speeds_of(device())
    found = corrected(said, (1e9, 1e9))

    assert found.host_step == said.host_step
    assert found.sources.startswith("link speeds measured just now")
    assert found.sources.endswith(said.steps)
