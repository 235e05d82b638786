"""A look at a study's disk, and the plan that was made by it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shoal
from shoal.bench import Disk, Rate, disk
from shoal.core.plan import Plan
from shoal.core.units import Seconds
from shoal.device.pace import SystemClock
from shoal.launch import run as run_module
from shoal.launch import saving
from shoal.launch.policy import CheckpointPolicy
from shoal.launch.saving import interval_of, states_of
from shoal.testing import make_device, make_job, make_shard

MIB = 2**20


def policy(every_s: float = 300.0, *, is_named: bool = False) -> CheckpointPolicy:
    return CheckpointPolicy(
        every_s=Seconds(every_s),
        keep=2,
        keep_finished="all",
        disk_budget=None,
        is_named=is_named,
    )


def plan(mebibytes: int, trials: int = 4, active: int = 2) -> Plan:
    """Trials with so much of weights, and twice that of state."""
    return Plan(
        study="s",
        devices=(make_device(),),
        jobs=tuple(make_job(n, [make_shard(0, mebibytes * MIB)]) for n in range(trials)),
        active=active,
        seconds=Seconds(1.0),
        failures={},
    )


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is seen at each look, in bytes a second; the last is the next one."""
    seen: list[float] = []
    monkeypatch.setattr(saving, "glance", lambda place, budget_s, clock: seen.pop())
    monkeypatch.setattr(saving, "load", lambda: None)
    return seen


def test_states_are_those_of_the_trials_that_train_at_a_time():
    states = states_of(plan(100))

    assert states.trials == 2
    assert states.largest > 300 * MIB
    assert states.together == 2 * states.largest


def test_a_tiny_study_s_disk_is_not_looked_at(tmp_path: Path, looks: list[float]):
    assert interval_of(policy(), plan(1), tmp_path).every_s == 300  # it would pop from nothing


def test_a_slow_disk_is_looked_at_twice_and_believed(tmp_path: Path, looks: list[float]):
    looks += [1.1e6, 1e6]
    found = interval_of(policy(), plan(100), tmp_path)

    assert found.every_s > 4 * 600 * MIB / 1.1e6
    assert f"the disk of {tmp_path} writes 1.0 MiB/s" in found.why
    assert not looks


def test_a_disk_that_was_slow_for_a_moment_is_not_slow(tmp_path: Path, looks: list[float]):
    looks += [1e9, 1e6]

    assert interval_of(policy(), plan(100), tmp_path).why == ""


def test_a_named_interval_stays(tmp_path: Path, looks: list[float]):
    looks += [1e6, 1e6]
    found = interval_of(policy(300.0, is_named=True), plan(100), tmp_path)

    assert found.every_s == 300
    assert "stays, as it was named" in found.why


@pytest.mark.parametrize(
    ("kind", "age_s", "first_look_s", "is_expected"),
    [
        ("", 60.0, saving.RECENT_LOOK_S, True),
        ("", 9e5, saving.LOOK_S, True),
        ("another", 60.0, saving.LOOK_S, False),
    ],
    ids=["recent", "old", "another file system"],
)
def test_what_was_kept_of_such_a_disk_is_expected_and_makes_the_look_shorter(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    age_s: float,
    first_look_s: float,
    is_expected: bool,
):
    write = Rate(best=1e9, median=1e9, samples=3)
    kept = SimpleNamespace(
        taken_at=time.time() - age_s,
        disk=Disk(
            write=write, read=write, direct=True, file_system=kind or disk.file_system(tmp_path)
        ),
    )
    budgets = []

    def glance(place: Path, budget_s: float, clock: object) -> float:
        budgets.append(budget_s)
        return 100e6

    monkeypatch.setattr(saving, "load", lambda: kept)
    monkeypatch.setattr(saving, "glance", glance)
    found = interval_of(policy(), plan(100), tmp_path)

    assert found.every_s == 300
    assert ("far less than 953.7 MiB/s expected" in found.why) == is_expected
    assert budgets == [first_look_s, saving.LOOK_S][: 1 + is_expected]


def test_where_nothing_can_be_written_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(saving, "glance", lambda place, budget_s, clock: None)

    assert interval_of(policy(), plan(100), tmp_path).why == ""


def test_a_glance_leaves_nothing_and_is_over_soon(tmp_path: Path):
    clock = SystemClock()
    begin = clock.now()
    found = disk.glance(tmp_path, 0.1, clock)

    assert found is not None
    assert found > 1e4
    assert clock.now() - begin < 30.0  # a shared machine may take its time
    assert not list(tmp_path.iterdir())


def test_a_glance_at_what_is_not_there_is_none(tmp_path: Path):
    assert disk.glance(tmp_path / "gone", 0.1, SystemClock()) is None


class StepClock:
    """Says that each write takes ``sync_s`` and its bytes at ``bytes_per_s``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, sync_s: float) -> None:
        self._now, self.written = 0.0, 0
        real = disk.os.write

        def write(descriptor: int, data: memoryview) -> int:
            self._now += len(data) / bytes_per_s
            self.written += len(data)
            return real(descriptor, data)

        def sync(descriptor: int) -> None:
            self._now += sync_s

        monkeypatch.setattr(disk.os, "write", write)
        monkeypatch.setattr(disk.os, "fdatasync", sync)

    def now(self) -> float:
        return self._now


@pytest.mark.parametrize(
    ("bytes_per_s", "sync_s", "at_least", "least_mib", "most_s"),
    [(1e9, 1e-4, 0.99, 16, 0.1), (150e6, 0.01, 0.99, 4, 0.1), (2e6, 0.01, 0.99, 0.25, 0.2)],
    ids=["nvme", "rotating", "slow"],
)
def test_a_glance_stays_within_its_time_and_sees_past_the_sync(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bytes_per_s: float,
    sync_s: float,
    at_least: float,
    least_mib: float,
    most_s: float,
):
    clock = StepClock(monkeypatch, bytes_per_s, sync_s)
    found = disk.glance(tmp_path, 0.1, clock)

    assert found is not None
    assert at_least <= found / bytes_per_s <= 1.01
    assert clock.written >= least_mib * MIB
    assert clock.now() <= most_s


def model(hp):
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))


def data(hp):
    return [(torch.ones(2, 64), torch.tensor([0, 1]))] * 2, None


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


@pytest.mark.parametrize("every", [None, 300])
def test_a_study_on_a_slow_disk_is_planned_and_run_with_what_it_bears(
    tmp_path: Path, warm_workers, monkeypatch: pytest.MonkeyPatch, every: float | None
):
    monkeypatch.setattr(saving, "LEAST_BYTES", 1)
    monkeypatch.setattr(saving, "glance", lambda place, budget_s, clock: 100.0)
    recipe = shoal.Recipe(model=model, data=data, loss=loss)
    study = shoal.Study(
        "s",
        recipe,
        space={"lr": 0.1},
        trials=1,
        steps=2,
        directory=tmp_path,
        checkpoint_every=every,
    )
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    text = study.plan(hardware=hardware, workers=warm_workers, progress=False).explain()
    assert "writes 100 B/s, measured just now" in text
    assert ("stays, as it was named" in text) == (every is not None)
    assert ("is first saved after" in text) == (every is None)

    said, used = [], []
    execution = run_module.Execution

    def watched(planned, pool, planner, settings, *args, **options):
        used.append(settings.checkpoint_every_s)
        return execution(planned, pool, planner, settings, *args, **options)

    monkeypatch.setattr(run_module, "Execution", watched)
    study.run(hardware=hardware, workers=warm_workers, progress=False, callbacks=[said.append])
    changes = [event.changes for event in said if type(event).__name__ == "StudyChanged"]
    assert ["writes 100 B/s" in words for (words,) in changes] == [True]
    assert [every_s > 300 for every_s in used] == [every is None]
    kept = Plan.from_json((tmp_path / "s" / "plan.json").read_text())
    assert "writes 100 B/s" in kept.explain()
