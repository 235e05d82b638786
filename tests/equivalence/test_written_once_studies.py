"""Weights that nothing trains: on the disk once or twice for all trials, and the bits of alone."""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path

import commands
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.event import CheckpointDamaged, CheckpointWritten
from shoal.observe.reader import read_events
from shoal.observe.snapshot import Snapshot
from shoal.runtime.saving import checkpoint
from shoal.storage.manifest import APART
from shoal.testing import assert_same, plain_loop
from shoal.verify import verify_trials

WIDTH = 520  # its square in float32 is more than LEAST_SHARED_BYTES
BASE_BYTES = 4 * (6 * WIDTH + WIDTH + WIDTH * WIDTH + WIDTH)
SPACE = shoal.grid(lr=[1e-3, 1e-2, 1e-1])


def model(hp):
    draws = torch.Generator().manual_seed(7)
    base = [nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    for module in base:
        for parameter in module.parameters():
            parameter.requires_grad_(False)
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * WIDTH**-0.5)
    return nn.Sequential(*base, nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def data(hp):
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=draws)
    rows = TensorDataset(x, torch.randint(3, (40,), generator=draws))
    return DataLoader(rows, 8, shuffle=True), DataLoader(rows, 8)


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sgd(named_parameters, hp):
    return torch.optim.SGD([p for _, p in named_parameters], lr=hp["lr"], momentum=0.9)


def base_of(optimizer):
    return optimizer.param_groups[0]["params"][:4]


class Unfreezes(LambdaLR):
    """The base, after the seventh step."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda epoch: 1.0)

    def step(self):
        super().step()
        if self.last_epoch == 7:
            for parameter in base_of(self.optimizer):
                parameter.requires_grad_(True)


class Writes(LambdaLR):
    """To the base, after the seventh step, in a way that torch does not count."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda epoch: 1.0)

    def step(self):
        super().step()
        if self.last_epoch == 7:
            for parameter in base_of(self.optimizer):
                parameter.data.mul_(0.5)


def unfreezes(optimizer, hp):
    return Unfreezes(optimizer)


def writes(optimizer, hp):
    return Writes(optimizer)


RECIPE = shoal.Recipe(model=model, data=data, loss=loss)
SCHEDULED = {"model": model, "data": data, "loss": loss, "optimizer": sgd}


@pytest.fixture
def run(tmp_path, warm_workers):
    def runs(devices=1, of=RECIPE, study=None, **options):
        asked = {"space": SPACE, "epochs": 2, "checkpoint_every": 0, **(study or {})}
        made = shoal.Study("it", of, directory=tmp_path, **asked)
        hardware = shoal.Hardware.virtual(devices=devices, memory="64MiB")
        return made.run(hardware=hardware, workers=warm_workers, **options)

    return runs


def saved(report, trial):
    return checkpoint.generations(report.directory, trial).all()


def inodes(report):
    """Of the files that hold a base."""
    return {path.stat().st_ino for path in report.directory.rglob(APART)}


def assert_alone(report, of=RECIPE):
    for trial in report.trials:
        alone = plain_loop(of, trial.hp, trial.seed, epochs=2)
        assert_same(alone, trial)
        for name, tensor in alone.model.state_dict().items():
            assert torch.equal(trial.load().state_dict()[name], tensor)


def assert_verified(report):
    trials = Snapshot.of(read_events(report.directory)).trials
    for verdict in verify_trials(report.directory, trials, recipe=RECIPE):
        assert verdict.equal, verdict.first_difference


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {"devices": 2},
        {"technique": shoal.Spilled(shards=2), "devices": 2},
        {"technique": shoal.Spilled(shards=2, optimizer="host")},
        {"technique": shoal.Pipelined(schedule="flush", stages=2), "devices": 2},
    ],
    ids=["resident", "spilled", "on the host", "pipelined"],
)
def test_a_base_is_on_the_disk_twice_for_all_trials(options, run):
    report = run(**options)
    assert_alone(report)
    assert len(inodes(report)) == 2
    written = [e.bytes for e in read_events(report.directory) if isinstance(e, CheckpointWritten)]
    assert len(written) >= 33
    assert sum(size > BASE_BYTES for size in written) == 2


def test_in_arrays_too(run):
    report = run(fuse=3)
    assert_verified(report)
    assert len(inodes(report)) == 2


class Replaced(nn.Linear):
    """As peft replaces a head: what was there stays, frozen, and is drawn anew in each trial."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.before = nn.Linear(*sizes).requires_grad_(False)


def replaced(hp):
    return model(hp).append(Replaced(3, 3))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"technique": shoal.Spilled(shards=2)}])
def test_a_base_of_which_each_trial_has_a_little_of_its_own_is_shared_but_for_that(options, run):
    recipe = shoal.Recipe(model=replaced, data=data, loss=loss)
    space = shoal.grid(lr=[1e-3, 3e-3, 1e-2, 3e-2, 1e-1])
    report = run(of=recipe, study={"space": space}, **options)
    assert_alone(report, recipe)
    assert len(inodes(report)) <= 4  # the first trial met no other one, and has two of its own
    for trial in report.trials[1:]:
        for generation in saved(report, trial.number):
            names = generation.manifest.files[APART].tensors.keys()
            assert "2.weight" in names
            assert "7.before.weight" not in names
    written = [e.bytes for e in read_events(report.directory) if isinstance(e, CheckpointWritten)]
    assert sum(size > BASE_BYTES for size in written) <= 4


@pytest.mark.sample(1)
@pytest.mark.parametrize("keep", [1, 2])
def test_where_the_weights_of_finished_trials_are_kept(keep, run):
    report = run(study={"keep_finished": "weights", "keep": keep})
    assert len(inodes(report)) <= keep
    for trial in report.trials:
        (last,) = saved(report, trial.number)
        assert set(last.manifest.files) == {APART, checkpoint.WEIGHTS}
        alone = plain_loop(RECIPE, trial.hp, trial.seed, epochs=2)
        for name, tensor in alone.model.state_dict().items():
            assert torch.equal(trial.load().state_dict()[name], tensor)


@pytest.mark.slow
def test_who_goes_on_from_another_ones_state_has_its_base(run):
    space = {"lr": shoal.log_uniform(1e-3, 1e-1)}
    pruner = shoal.PBT(interval=1, quantile=0.25)
    report = run(study={"space": space, "trials": 4, "pruner": pruner, "epochs": 3})
    assert any(trial.inherited for trial in report.trials)
    assert len(inodes(report)) == 2
    assert_verified(report)


def test_unfrozen_midway_it_is_saved_each_time_from_then_on(run):
    recipe = shoal.Recipe(schedule=unfreezes, **SCHEDULED)
    report = run(of=recipe, study={"keep": 30, "space": {"lr": 1e-2}})
    assert_alone(report, recipe)
    for trial in report.trials:
        for generation in saved(report, trial.number):
            assert (APART in generation.manifest.files) is (generation.step < 7)
            state = checkpoint.read_state(generation.path)["model"]
            alone = plain_loop(recipe, trial.hp, trial.seed, steps=generation.step)
            assert torch.equal(state["2.weight"], alone.model.state_dict()["2.weight"])


def test_what_writes_to_it_all_the_same_is_seen_by_its_bits(run):
    recipe = shoal.Recipe(schedule=writes, **SCHEDULED)
    report = run(of=recipe, study={"keep": 30, "space": {"lr": 1e-2}})
    assert_alone(report, recipe)
    for trial in report.trials:
        for generation in saved(report, trial.number):
            assert (APART in generation.manifest.files) is (generation.step != 7)
            state = checkpoint.read_state(generation.path)["model"]
            alone = plain_loop(recipe, trial.hp, trial.seed, steps=generation.step)
            assert torch.equal(state["2.weight"], alone.model.state_dict()["2.weight"])
    assert len(inodes(report)) == 4


def flip(path):
    """Damage in place, in all generations that have it; no time tells of it."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)[0]
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.slow
def test_a_damaged_base_costs_a_generation_and_is_not_handed_on(run, tmp_path):
    first = run(study={"epochs": 1})
    newest = saved(first, 0)[-1]
    flip(newest.path / APART)
    hurt = (newest.path / APART).stat().st_ino
    damaged = [n for n in range(3) if (saved(first, n)[-1].path / APART).stat().st_ino == hurt]
    script = tmp_path / "again.py"
    here = str(Path(__file__).parent)
    script.write_text(textwrap.dedent(SCRIPT.format(here=here, place=str(tmp_path), fuse=False)))

    commands.run(script, "999", cwd=tmp_path).check_returncode()  # other workers than before

    report = shoal.open(tmp_path / "it", recipe=RECIPE)
    assert_alone(report)
    told = [e for e in read_events(report.directory) if isinstance(e, CheckpointDamaged)]
    assert {event.trial for event in told} == set(damaged) >= {0}
    assert all(APART in event.reason for event in told)
    for trial in range(3):
        for generation in saved(report, trial):
            generation.verify()


SCRIPT = """
    import os, signal, sys
    sys.path.insert(0, {here!r})
    import shoal
    from test_written_once_studies import RECIPE, SPACE

    study = shoal.Study(
        "it", RECIPE, space=SPACE, epochs=2, directory={place!r}, checkpoint_every=0
    )
    left = [int(sys.argv[1])]

    class Kills:
        def __call__(self, event):
            left[0] -= type(event).__name__ == "CheckpointWritten"
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if __name__ == "__main__":
        hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
        study.run(hardware=hardware, callbacks=[Kills()], fuse={fuse!r})
"""


@pytest.mark.parametrize("fuse", [False, pytest.param(3, marks=pytest.mark.full)])
def test_killed_and_resumed_it_is_the_same(fuse, tmp_path):
    here = str(Path(__file__).parent)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(here=here, place=str(tmp_path), fuse=fuse)))
    for saves in (4, 999):
        done = commands.run(script, str(saves), cwd=tmp_path)
        assert done.returncode == (0 if saves == 999 else -signal.SIGKILL)
    report = shoal.open(tmp_path / "it", recipe=RECIPE)
    if not fuse:
        assert_alone(report)
    assert_verified(report)
    assert len(inodes(report)) == 2
    for trial in range(3):
        for generation in saved(report, trial):
            generation.verify()
