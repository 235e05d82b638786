"""What a trial keeps in Python is its own, and goes on with it in another process."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import os
import random
import signal
import traceback
import types
from pathlib import Path

import elsewhere
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import shoal
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
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


class Wrapping(torch.optim.Optimizer):
    """Steps by another one, as SAM does, which has a state of its own."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


def wrapping(named, hp):
    return Wrapping([p for _, p in named], lr=hp["lr"])


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
    build = (lambda hp: model()) if isinstance(model, type) else model
    return shoal.Recipe(**{"model": build, "data": data, "loss": loss, **more})


class Plain(Net):
    def change(self, x):
        return x


class Meter(nn.Module):
    """A loss that counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, output, batch):
        self.calls += 1
        return F.cross_entropy(output, batch[1]) / (1 + 0.1 * self.calls)


AVERAGES = {}
MEAN = None
PAST = []


def averaged(output, batch):
    """Beside means that begin with the first batch, and a list of losses that grows."""
    global MEAN
    value = F.cross_entropy(output, batch[1])
    mean = value.detach() if MEAN is None else 0.9 * MEAN + 0.1 * value.detach()
    if output.requires_grad:
        MEAN = mean
        AVERAGES["ema"] = 0.5 * AVERAGES.get("ema", 0.0) + value.detach()
        PAST.extend([value.item()] * 60)
        value = value / (1 + AVERAGES["ema"] + sum(PAST) / len(PAST))
    return value / mean.clamp_min(0.1)


def elsewhere_weighted(output, batch):
    return F.cross_entropy(output, batch[1]) * elsewhere.weight()


TABLE = np.frombuffer(np.arange(1, 9, dtype=np.float32).tobytes(), dtype=np.float32)  # read-only
GRAPH = torch.eye(8).to_sparse()
ACT = torch.tanh
SCALE = 1.0


class Chosen(Net):
    def change(self, x):
        return ACT(torch.sparse.mm(GRAPH, x.t()).t() / torch.from_numpy(TABLE.copy()))


def chosen(hp):
    global ACT
    ACT = F.gelu if hp["lr"] < 0.05 else F.relu
    return Chosen()


def collate(rows):
    x, y = torch.utils.data.default_collate(rows)
    return x * SCALE, y


def scaled_data(hp):
    global SCALE
    SCALE = 1 + 10 * hp["lr"]
    return DataLoader(Rows(), BATCH, shuffle=True, collate_fn=collate), DataLoader(Rows(), 16)


CALLS = itertools.count(1)


def calls_before(seen=[], *, steps=itertools.count()):  # noqa: B006, B008 - they are tested
    seen.append(next(steps))
    return len(seen) + seen[-1]


def counting(output, batch):
    """By a count, and by what default values of arguments have come to."""
    scale = 1 + 0.1 * next(CALLS) + 0.05 * calls_before()
    return F.cross_entropy(output, batch[1]) / scale


EPOCH = 0


class Fresh:
    """New points in each epoch."""

    def __len__(self):
        return ROWS // BATCH

    def __iter__(self):
        global EPOCH
        EPOCH += 1
        for number in range(len(self)):
            generator = torch.Generator().manual_seed(100 * EPOCH + number)
            x = torch.randn(BATCH, 8, generator=generator)
            yield x, x[:, :2].sum(1).gt(0).long()


def fresh_data(hp):
    return Fresh(), DataLoader(Rows(), 16)


READ = None
CENTRE = 0.0
TEACHER = nn.Linear(8, 8, bias=False)
TAUGHT = False
MADE = {}


def loaded(hp):
    """What it has read once it reads no more; and its model is to be had by everybody."""
    global READ, CENTRE, TAUGHT
    if READ is None:
        READ = torch.randn(20_000, generator=torch.Generator().manual_seed(5)) + 0.5
        CENTRE = float(READ.mean())
    if not TAUGHT:
        nn.init.eye_(TEACHER.weight)
        TAUGHT = True
    MADE["model"] = Plain()
    return MADE["model"]


def taught(output, batch):
    x, y = batch
    target = TEACHER(x).detach().sum(1, keepdim=True) * CENTRE
    weight = sum(one for one in (7, 15, 3)) * 1e-3 * MADE["model"].first.weight.square().mean()
    return F.cross_entropy(output, y) + (output[:, :1] - target).square().mean() + weight


class Phase(enum.Enum):
    FIRST = 1
    REST = 2


@dataclasses.dataclass(slots=True)
class Counts:
    steps: int = 0


class Memory(list):
    pass


class Switching(Net):
    """Objects under several names, and of kinds that are easily taken for others."""

    def __init__(self):
        super().__init__()
        self.phase, self.counts, self.memory = Phase.FIRST, Counts(), Memory()
        self.num_hooks_run = 0
        self.lists = [[1.0], [2.0]]
        self.active = self.lists[0]
        self.mean = self.alias = None
        self.order = [self.first, self.last]
        self.last.weight.register_hook(self.count())

    def count(self):
        calls = 0

        def hook(grad):
            nonlocal calls
            calls += 1
            return grad / (1 + 0.1 * calls)

        return hook

    def change(self, x):
        if not self.training:
            return x
        if self.mean is None:
            self.mean = self.alias = torch.ones(8)
        self.mean += 0.1
        self.counts.steps += 1
        self.memory.append(self.counts.steps)
        self.num_hooks_run += 1
        self.order.reverse()
        if self.counts.steps == 5:
            self.phase, self.active = Phase.REST, self.lists[1]
        self.active[0] *= 0.95
        x = x * self.alias * (1.1 if self.phase is Phase.REST else 1.0)
        x = x / (len(self.memory) + self.num_hooks_run) ** 0.25
        return x * self.lists[1][0] + self.order[0].weight.mean()


class Freezing(torch.optim.lr_scheduler.LRScheduler):
    """Has a parameter of the model's, beside numbers of its own."""

    def __init__(self, optimizer):
        first = optimizer.param_groups[0]["params"][0]
        self.pairs, self.factor = [(first, torch.ones(()))], 1.0
        super().__init__(optimizer)

    def get_lr(self):
        self.pairs[0][1].mul_(0.98)
        return [base * float(self.pairs[0][1]) for base in self.base_lrs]


def sequential(optimizer, hp):
    schedulers = [Freezing(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[20])


ATTRIBUTES = {
    "hidden state": recipe(Recurrent),
    "counts and objects": recipe(Annealed),
    "generators": recipe(OwnNoise),
    "an optimizer's own": recipe(Plain, optimizer=averaging),
    "an optimizer within another": recipe(Plain, optimizer=wrapping),
    "a hook's": recipe(Plain, optimizer=hooked),
    "a schedule's closure": recipe(Plain, schedule=closing),
    "several names": recipe(Switching),
    "a schedule with a parameter": recipe(Plain, schedule=sequential),
}
GLOBALS = {
    "that are set": recipe(scaled),
    "that steps write": recipe(Plain, loss=counted),
    "a loss that is a module": recipe(Plain, loss=Meter()),
    "means and lists": recipe(Plain, loss=averaged),
    "of another file": recipe(Plain, loss=elsewhere_weighted),
    "that are functions": recipe(chosen),
    "of a collate function": recipe(Plain, data=scaled_data),
    "that are loaded once": recipe(loaded, loss=taught),
    "counts and defaults": recipe(Plain, loss=counting),
    "that reading data changes": recipe(Plain, data=fresh_data),
}
UNKILLED = (
    *("of another file", "that are functions"),
    *("of a collate function", "that reading data changes"),
)
"""Whose data kill no process, so that trials go on in none."""


def assert_alone(of, trial, epochs=EPOCHS):
    """In a process of its own, that has the globals as the recipe came with them."""
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            assert_same(plain_loop(of, {"lr": trial.hp["lr"]}, trial.seed, epochs=epochs), trial)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


KEPT = ATTRIBUTES | {
    f"globals {name}": one for name, one in GLOBALS.items() if name not in UNKILLED
}
SHARED = GLOBALS | {name: ATTRIBUTES[name] for name in list(ATTRIBUTES)[:2]}


@pytest.mark.sample(2)
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
        assert_alone(of, trial)


@pytest.mark.sample(3)
@pytest.mark.parametrize("of", SHARED.values(), ids=SHARED)
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
        assert not trial.error
        assert_alone(of, trial, trial.history[-1]["step"] * BATCH // ROWS)


def test_a_function_that_a_factory_chooses_is_no_arrays(tmp_path, warm_workers):
    study = shoal.Study(
        *("it", recipe(chosen)), space=shoal.grid(lr=[0.03, 0.1]), epochs=1, directory=tmp_path
    )
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    report = study.run(hardware=hardware, workers=warm_workers, fuse=2)
    for trial in report.trials:
        assert_alone(recipe(chosen), trial, 1)


class Hidden(Net):
    """Keeps something that nobody can look into, after some steps."""

    def __init__(self, after):
        super().__init__()
        self.after, self.calls, self.it = after, 0, itertools.cycle([1, 2])

    def change(self, x):
        self.calls += 1
        if self.calls > self.after:
            next(self.it)
        return x


@pytest.mark.parametrize("after", [0, 20], ids=["at once", "after some steps"])
def test_what_cannot_be_kept_is_told_of_once(after, tmp_path, warm_workers, capsys):
    of = recipe(lambda hp: Hidden(after))
    study = shoal.Study(
        *("it", of), space=shoal.grid(lr=[0.1, 0.03]), epochs=EPOCHS, directory=tmp_path
    )
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    report = study.run(hardware=hardware, workers=warm_workers, fuse=False)
    (warning,) = Snapshot.of(read_outline(report.directory)).warnings
    assert warning.startswith("a step changes 'it' of the model, which is nothing that a checkpo")
    assert capsys.readouterr().err.count(warning) == 1
    for trial in report.trials:
        assert_alone(of, trial)


class Anneals(nn.Module):
    """Its loss depends on how often it was called; and it keeps its last hidden state."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 2)
        self.calls, self.hidden, self.seen = 0, None, {}

    def forward(self, x):
        hidden = self.first(x).tanh()
        if self.training:
            self.calls += 1
            self.hidden = hidden.detach().mean(0)
            self.seen["rows"] = self.seen.get("rows", 0) + len(x)
        kept = 0.0 if self.hidden is None else self.hidden
        return self.last(hidden + min(1.0, self.calls / 50) * kept)


@pytest.mark.parametrize("keep_finished", ["all", "weights"])
def test_a_model_that_is_loaded_keeps_what_it_kept(keep_finished, run_study, tmp_path):
    recipe = shoal.Recipe(model=lambda hp: Anneals(), data=data, loss=loss)
    report = run_study(recipe, {"lr": 0.01}, epochs=2, keep_finished=keep_finished)
    alone = plain_loop(recipe, {"lr": 0.01}, 0, epochs=2).model
    loaded = report.best.load()
    if keep_finished == "weights":
        assert (loaded.calls, loaded.hidden, loaded.seen) == (0, None, {})
        return
    assert (loaded.calls, loaded.seen) == (alone.calls, alone.seen) == (16, {"rows": 128})
    assert torch.equal(loaded.hidden, alone.hidden)
    rows = torch.ones(3, 8)
    assert torch.equal(loaded(rows), alone.eval()(rows))
    text = (report.best.export(tmp_path / "out") / "README.md").read_text()
    assert "'calls' of the model, 'hidden' of the model, 'seen' of the model" in text
