"""What a trial keeps in Python is its own, and goes on with it in another process."""

from __future__ import annotations

import os
import random
import signal
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import shoal
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.pystate import Ambient
from shoal.testing import assert_same, plain_loop

ROWS, BATCH, EPOCHS = 64, 8, 4


class Rows(Dataset):
    """Kills its process once where ``flag`` says a file to be, late in the third epoch."""

    def __init__(self, flag=None):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(ROWS, 8, generator=generator)
        self.flag, self.looks = flag and Path(flag), 0

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        self.looks += 1
        if self.flag and self.looks == 2 * ROWS + 40 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.x[index], self.x[index, :2].sum().gt(0).long()


def data(hp):
    valid = DataLoader(Rows(), 16)
    return DataLoader(Rows(hp.get("flag")), BATCH, shuffle=True), valid


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.change(self.first(x))))


class Recurrent(Net):
    """Goes on from the hidden state of the batch before."""

    def __init__(self):
        super().__init__()
        self.hidden = None

    def change(self, x):
        if not self.training:
            return x
        x = x if self.hidden is None else x + 0.5 * self.hidden.detach()
        self.hidden = x
        return x


class Annealed(Net):
    """By counts and objects of several kinds."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.kept = types.SimpleNamespace(rate=1.0, past=[torch.zeros(8)])
        self.sums = {"mean": np.zeros(8, dtype=np.float32)}

    def change(self, x):
        if self.training:
            self.calls += 1
            self.kept.rate *= 0.9
            self.kept.past.append(x.detach().mean(0))
            self.sums["mean"] += 0.1 * x.detach().mean(0).numpy()
        noise = torch.stack(self.kept.past[-3:]).mean(0)
        return x * self.kept.rate + noise + torch.from_numpy(self.sums["mean"]) / self.calls


class OwnNoise(Net):
    """From generators of the model's own."""

    def __init__(self):
        super().__init__()
        self.torch = torch.Generator().manual_seed(1)
        self.numpy, self.python = np.random.default_rng(2), random.Random(3)

    def change(self, x):
        noise = torch.randn(x.shape, generator=self.torch) * self.python.random()
        return x + 0.1 * noise * float(self.numpy.random())


class Averaging(torch.optim.SGD):
    """Steps by a mean that no state has, and counts."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.means, self.count = {}, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            mean = self.means.get(number, torch.zeros_like(parameter))
            self.means[number] = mean = 0.9 * mean + parameter.grad
            parameter.grad = mean / self.count**0.5
        return super().step()


def averaging(named, hp):
    return Averaging([p for _, p in named], lr=hp["lr"])


def hooked(named, hp):
    """Pulls to an average that only its hook has."""
    parameters = [p for _, p in named]
    optimizer = torch.optim.SGD(parameters, lr=hp["lr"])
    averages = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def pull(*_):
        for average, parameter in zip(averages, parameters, strict=True):
            average.lerp_(parameter, 0.1)
            parameter.lerp_(average, 0.2)

    optimizer.register_step_post_hook(pull)
    return optimizer


def closing(optimizer, hp):
    calls = 0

    def rate(epoch):
        nonlocal calls
        calls += 1
        return 1 / (1 + 0.1 * calls)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


CONFIG = {"scale": 1.0}
STEP = 0


class Scaled(Net):
    rate = 1.0

    def change(self, x):
        return x * CONFIG["scale"] * self.rate


def scaled(hp):
    CONFIG["scale"], Scaled.rate = 1 + 10 * hp["lr"], hp["lr"]
    return Scaled()


def counted(output, batch):
    global STEP
    STEP += 1
    counted.mean = 0.9 * getattr(counted, "mean", 0.0) + 0.1
    return F.cross_entropy(output, batch[1]) * (1 + STEP) ** -0.5 * counted.mean


def recipe(model=Net, **more):
    build = model if model is scaled else lambda hp: model()
    return shoal.Recipe(**{"model": build, "data": data, "loss": loss, **more})


class Plain(Net):
    def change(self, x):
        return x


KEPT = {
    "hidden state": recipe(Recurrent),
    "counts and objects": recipe(Annealed),
    "generators": recipe(OwnNoise),
    "an optimizer's own": recipe(Plain, optimizer=averaging),
    "a hook's": recipe(Plain, optimizer=hooked),
    "a schedule's closure": recipe(Plain, schedule=closing),
    "globals that are set": recipe(scaled),
    "globals that steps write": recipe(Plain, loss=counted),
}


def alone(of, trial, epochs=EPOCHS):
    ambient = Ambient(of)
    result = plain_loop(of, {"lr": trial.hp["lr"]}, trial.seed, epochs=epochs)
    ambient.begin()
    return result


@pytest.mark.parametrize("of", KEPT.values(), ids=KEPT)
def test_a_trial_that_goes_on_in_another_process_ends_as_alone(of, tmp_path, warm_workers):
    space = shoal.grid(lr=[0.03, 0.1], flag=[str(tmp_path / "flag")])
    study = shoal.Study(
        *("it", of), space=space, epochs=EPOCHS, directory=tmp_path, checkpoint_every=0, retries=1
    )
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    report = study.run(hardware=hardware, workers=warm_workers, technique="resident")
    assert (tmp_path / "flag").exists()
    assert not Snapshot.of(read_outline(report.directory)).warnings
    for trial in report.trials:
        assert not trial.error
        assert_same(alone(of, trial), trial)


@pytest.mark.parametrize("of", KEPT.values(), ids=KEPT)
def test_trials_that_alternate_and_are_parked_end_as_alone(of, tmp_path, warm_workers):
    study = shoal.Study(
        *("it", of),
        space=shoal.grid(lr=[0.03, 0.06, 0.1]),
        epochs=EPOCHS,
        directory=tmp_path,
        pruner="asha",
        metric="valid_loss",
    )
    hardware = shoal.Hardware.virtual(devices=2, memory="64MiB")
    report = study.run(hardware=hardware, workers=warm_workers, fuse=False)
    for trial in report.trials:
        epochs = trial.history[-1]["step"] * BATCH // ROWS
        assert_same(alone(of, trial, epochs), trial)


class Opaque:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class Hidden(Net):
    """Keeps something that nobody can look into."""

    def __init__(self):
        super().__init__()
        self.it = Opaque()

    def change(self, x):
        self.it = Opaque()
        return x


def test_what_cannot_be_kept_is_told_of(tmp_path, warm_workers):
    study = shoal.Study(
        *("it", recipe(Hidden)), space=shoal.grid(lr=[0.1]), epochs=1, directory=tmp_path
    )
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    report = study.run(hardware=hardware, workers=warm_workers)
    (warning,) = Snapshot.of(read_outline(report.directory)).warnings
    assert warning.startswith("a step changes 'it' of the model, which is nothing that a checkpo")
