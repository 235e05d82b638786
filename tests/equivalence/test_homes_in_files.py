"""Trials whose states are in files, since the host's memory is too small, end on the same bits."""

from __future__ import annotations

import os
import tempfile
import textwrap
import time
from pathlib import Path

import commands
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.plan import OWN_DIRECTORY
from shoal.memory import store

SPACE = shoal.grid(lr=[0.01, 0.003], width=[160])


def build(hp):
    width = hp["width"]
    blocks = [layer for _ in range(5) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(16, width), *blocks, nn.Linear(width, 5))


def data(hp):
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(8, 16, generator=generator), torch.arange(8) % 5) for _ in range(6)]
    return batches, batches[:2]


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


RECIPE = shoal.Recipe(model=build, data=data, loss=loss, splittable=True)


@pytest.fixture
def tmp_path():
    """On a disk: pytest's own may be in memory, which is no place for states."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        yield Path(place)


@pytest.fixture
def place(tmp_path):
    (tmp_path / "spilled").mkdir()
    return tmp_path / "spilled"


@pytest.fixture
def run(tmp_path, place, warm_workers):
    """Run a study whose states have no room in memory; its plan and its report."""

    def runs(*, memory="1MiB", host_memory="1MiB", devices=2, technique=None, fuse=None, **more):
        study = shoal.Study("it", RECIPE, space=SPACE, epochs=2, directory=tmp_path, **more)
        hardware = shoal.Hardware.virtual(
            devices=devices, memory=memory, host_memory=host_memory, spill_dir=place
        )
        how = {"technique": technique, "fuse": fuse, "workers": warm_workers}
        report = study.run(hardware=hardware, **how)
        return shoal.Plan.from_json((study.directory / "plan.json").read_text()), report

    return runs


WAYS = {
    "spilled": {},
    "resident": {"memory": "16MiB"},
    "captured": {"memory": "16MiB", "technique": "captured"},
    "a pipeline": {"memory": "16MiB", "technique": shoal.Pipelined(stages=2)},
    "saved at each step": {"checkpoint_every": 0},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_states_that_do_not_fit_the_hosts_memory_are_in_files_to_the_same_bits(
    how, run, place, assert_alone
):
    plan, report = run(**how)
    assert plan.spill_dir == str(place)
    assert all(job.disk_bytes > job.host_bytes for job in plan.jobs)
    assert f"in files in {place}" in plan.explain()
    assert_alone(report, report.trials, RECIPE, epochs=2)
    assert not list(place.iterdir()), "files without a name leave nothing"


def test_trials_of_an_array_are_at_home_in_files_too(run, place):
    plan, report = run(memory="16MiB", fuse=2)
    assert plan.spill_dir == str(place)
    assert {job.array.width for job in plan.jobs} == {2}
    assert not any(trial.error for trial in report.trials)


def test_where_there_is_room_nothing_is_in_files(run, assert_alone):
    plan, report = run(host_memory="64MiB")
    assert not plan.spill_dir
    assert not any(job.disk_bytes for job in plan.jobs)
    assert_alone(report, report.trials, RECIPE, epochs=2)


def test_who_asks_for_the_disk_has_it_in_the_studys_directory(
    tmp_path, warm_workers, assert_alone
):
    technique = shoal.Spilled(offload="disk")
    study = shoal.Study("it", RECIPE, space=SPACE, epochs=2, directory=tmp_path)
    hardware = shoal.Hardware.virtual(devices=1, memory="1MiB")
    report = study.run(hardware=hardware, technique=technique, workers=warm_workers)
    plan = shoal.Plan.from_json((study.directory / "plan.json").read_text())
    assert plan.spill_dir == OWN_DIRECTORY
    assert {job.technique.offload for job in plan.jobs} == {"disk"}
    assert_alone(report, report.trials, RECIPE, epochs=2)


@pytest.mark.slow
def test_a_plan_with_states_in_the_studys_directory_is_followed_elsewhere(
    tmp_path, warm_workers, assert_alone
):
    def make(place):
        return shoal.Study("it", RECIPE, space=SPACE, epochs=2, directory=tmp_path / place)

    hardware = shoal.Hardware.virtual(devices=1, memory="1MiB")
    how = {"technique": shoal.Spilled(offload="disk"), "workers": warm_workers}
    plan = make("there").plan(hardware=hardware, **how)
    assert not (tmp_path / "there").exists()
    study = make("here")
    report = study.run(plan=plan, workers=warm_workers)
    made = shoal.Plan.from_json((study.directory / "plan.json").read_text())
    assert made.spill_dir == plan.spill_dir == OWN_DIRECTORY
    assert_alone(report, report.trials, RECIPE, epochs=2)


@pytest.mark.slow
def test_a_plan_whose_directory_is_not_there_has_the_studys_instead(
    run, place, tmp_path, warm_workers
):
    plan, _ = run()
    place.rmdir()
    study = shoal.Study("it", RECIPE, space=SPACE, epochs=2, directory=tmp_path / "again")
    report = study.run(plan=plan, workers=warm_workers)
    assert not any(trial.error for trial in report.trials)


def test_a_disk_without_room_is_refused_with_the_numbers(run, monkeypatch):
    monkeypatch.setattr("shoal.launch.plan.free_bytes", lambda place: 1000)
    with pytest.raises(shoal.PlanError, match=r"states of 2 trials .* where 1000 B are free"):
        run()


def test_without_a_directory_the_refusal_names_the_way_out(tmp_path, warm_workers):
    study = shoal.Study("it", RECIPE, space=SPACE, epochs=2, directory=tmp_path)
    hardware = shoal.Hardware.virtual(devices=2, memory="1MiB", host_memory="1MiB")
    with pytest.raises(shoal.PlanError, match=r"or spill_dir= \(--spill-dir\), a directory on"):
        study.run(hardware=hardware, workers=warm_workers)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("/nowhere", "is no directory. Name one on a disk"),
        ("/dev/shm", "is in memory"),
        (3, "spill_dir is a directory's path, got 3"),
    ],
)
def test_what_is_no_directory_on_a_disk_is_refused(given, words):
    with pytest.raises(shoal.SpecError, match=words):
        shoal.Hardware.virtual(spill_dir=given)


def test_a_directory_that_cannot_be_written_to_is_refused(place, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(shoal.SpecError, match="cannot be written to"):
        shoal.Hardware.detect(spill_dir=place)


# -- files without a name -------------------------------------------------------------------


def test_a_region_is_a_file_without_a_name(place):
    descriptor = store.create_region("it", 5000, str(place))
    region = store.Region(descriptor, 5000)
    region.bytes.fill_(7)
    assert os.pread(descriptor, 3, 4990) == b"\7\7\7"
    assert os.fstat(descriptor).st_nlink == 0
    assert store.is_on_disk(descriptor)
    assert not list(place.iterdir())
    os.close(descriptor)
    memory = store.create_region("it", 10)
    assert not store.is_on_disk(memory)
    os.close(memory)


def test_where_no_file_can_be_without_a_name_it_loses_it(place, monkeypatch):
    real = os.open

    def unsupported(path, flags, *rest, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", unsupported)
    descriptor = store.create_region("it", 5000, str(place))
    assert os.fstat(descriptor).st_nlink == 0
    assert not list(place.iterdir())
    os.close(descriptor)


def test_a_full_disk_says_so(place, monkeypatch):
    def full(descriptor, at, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(shoal.core.errors.CapacityError, match=f"4.9 KiB in {place} for it: No sp"):
        store.create_region("it", 5000, str(place))


FILE = """
    import torch, shoal
    from torch import nn

    def build(hp):
        return nn.Sequential(*[nn.Linear(160, 160) for _ in range(6)])

    def data(hp):
        return [(torch.ones(2, 160), torch.tensor([0, 2]))] * 30, None

    def loss(output, batch):
        return nn.functional.cross_entropy(output, batch[1])

    recipe = shoal.Recipe(model=build, data=data, loss=loss)
    space = shoal.grid(lr=[0.1, 0.2])
    often = {"metric": "train_loss", "checkpoint_every": 0}
    study = shoal.Study("it", recipe, space=space, epochs=1, **often)
"""


def test_nothing_is_left_of_a_run_that_is_killed_and_it_goes_on(tmp_path, place):
    (tmp_path / "it.py").write_text(textwrap.dedent(FILE))
    words = ("run", "it.py", "--devices", "cpu:1", "--device-memory", "1MiB")
    words += ("--host-memory", "1MiB", "--spill-dir", str(place))
    with open(os.devnull, "wb") as null:
        process = commands.start(words, null.fileno(), null.fileno(), os.environ, tmp_path)
    trial = tmp_path / "runs" / "it" / "trials" / "0000"
    while len(list(trial.glob("step-*"))) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not list(place.iterdir())
    done = commands.run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "goes on from step" in done.stderr
    assert str(place) in (tmp_path / "runs" / "it" / "plan.json").read_text()
