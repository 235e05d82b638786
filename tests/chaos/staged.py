"""Trials in stages, and traps for the workers of their stages.

A trap is a file that a test lays for one process and one point of its work, and that says what
happens there, once. The points are the model's own code and the stages of a lease in the device's
loop. Imported by tests, by this name by worker processes, and by the files of
``processes.Runner``.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import studies
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.event import WorkerStarted
from shoal.core.technique import Schedule
from shoal.recipes.recipe import Recipe
from shoal.runtime import loop, reports
from shoal.runtime.gangs import desk as gangdesk
from shoal.runtime.gangs import replica, spilledstages, stage
from shoal.runtime.gangs.pipelined import without_versions
from shoal.runtime.saving import saver
from shoal.testing import assert_same, plain_2bw_loop, plain_loop
from shoal.verify import read_losses

TRAPS = "SHOAL_TEST_TRAPS"  # the environment's name for the folder with the traps
STAGES, WIDTH, BLOCKS, ACCUMULATE = 2, 16, 6, 4
OUTGROWN = 24  # the width of a trial whose first batch, which is measured, is the smallest
PAUSE_S = 0.5


# -- traps ------------------------------------------------------------------------------------


def lay(folder: Path, point: str, pid: int, what: str, nth: int = 1) -> None:
    """Have something happen to a process when it comes to a point for the nth time from now."""
    beside = folder / f"laying-{point}-{pid}"
    beside.write_text(f"{what}@{nth}")
    beside.rename(folder / f"{point}-{pid}")  # whole: the process may look at any moment


def step_on(point: str) -> None:
    """What is laid here for this process happens."""
    folder = os.environ.get(TRAPS)
    if not folder:
        return
    try:
        path = Path(folder) / f"{point}-{os.getpid()}"
        what, _, nth = path.read_text().partition("@")
        if nth != "1":
            path.write_text(f"{what}@{int(nth) - 1}")
            return
        path.unlink()
    except FileNotFoundError:
        return
    happen(what)


def happen(what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "kill later":  # what was handed to another thread is sent
        time.sleep(PAUSE_S / 5)
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "raise":
        raise RuntimeError("the stage gave up")
    if what == "pause":
        time.sleep(PAUSE_S)
    while what == "sleep":
        time.sleep(0.01)


def _with_traps(owner: Any, name: str, *, before: str = "", after: str = "") -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def trapped(*args, **kwargs):
        if before:
            step_on(before)
        result = method(*args, **kwargs)
        if after:
            step_on(after)
        return result

    setattr(owner, name, trapped)


def break_device(folder: Path, device: str) -> None:
    """From now on no worker can begin on a device, until the file is removed."""
    (folder / f"broken {device}").touch()


def _is_broken(device: str) -> bool:
    return (Path(os.environ.get(TRAPS, "")) / f"broken {device}").exists()


def _may_not_begin() -> None:
    worker = sys.modules["__main__"]
    pack = worker.pack_event

    @functools.wraps(pack)
    def trapped(event):
        if isinstance(event, WorkerStarted) and _is_broken(event.device):
            happen("kill")
        return pack(event)

    worker.pack_event = trapped


def _lay_out() -> None:
    """The points of a lease, in a worker; which tells of steps only when it has to."""
    reports.TELL_EVERY_S = 5.0
    if studies.FULL in os.environ:
        studies.lack_space()
    _may_not_begin()
    _with_traps(loop.DeviceLoop, "_admit", before="granted")
    _with_traps(gangdesk.GangDesk, "admit", after="seated")
    _with_traps(gangdesk.GangDesk, "_join", after="joined")
    for part in (stage.Stage, replica.Replica):
        _with_traps(part, "store", before="store", after="stored")
    _with_traps(spilledstages.SpilledStage, "rest", before="store", after="stored")
    _with_traps(replica.Replica, "finish", before="finish", after="finished")
    _with_traps(gangdesk.GangDesk, "_see_out", before="left")
    _with_traps(gangdesk.GangDesk, "_hand_over", before="over")
    _with_traps(saver.Saver, "_write", before="save", after="saved")


if studies.is_worker():
    _lay_out()


# -- the trials ---------------------------------------------------------------------------------


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        step_on("backward")
        return grad


class Block(nn.Module):
    """A residual block with dropout; every stage has some."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.work = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            if studies.is_worker():
                time.sleep(float(os.environ.get(studies.PACE_S, "0")) / BLOCKS)
            step_on("forward")
        return x + self.work(self.norm(_Backward.apply(x)))


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(12, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.leave = nn.Linear(width, 3)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class AdamW(torch.optim.AdamW):
    """Every stage has one of its own parameters."""

    def step(self, closure=None):
        step_on("step")
        return super().step(closure)


def build(hp):
    step_on("build")
    return Net(hp["width"])


def data(hp):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(56, 12, generator=generator)
    y = torch.randint(3, (56,), generator=generator)
    train = torch.utils.data.TensorDataset(x[:48], y[:48])
    valid = [(x[48:], y[48:])]
    if hp["width"] == OUTGROWN:
        return [(x[:4], y[:4]), *([(x[:40], y[:40])] * 11)], valid
    return torch.utils.data.DataLoader(train, 4, shuffle=True), valid


class Loss:
    """Cannot be loaded while its worker is to be broken."""

    def __setstate__(self, state) -> None:
        if studies.is_worker() and (Path(os.environ.get(TRAPS, "")) / "broken").exists():
            raise ImportError("the module of the loss is gone")

    def __getstate__(self):
        return {"kept": True}  # else it would not be set

    def __call__(self, output, batch):
        return F.cross_entropy(output, batch[1])


def optimizer(named_parameters, hp):
    return AdamW([parameter for _, parameter in named_parameters], lr=hp["lr"])


def recipe(**changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "model": build,
        "data": data,
        "loss": Loss(),
        "optimizer": optimizer,
        "schedule": studies.schedule,
        "metrics": {"accuracy": studies.accuracy},
        "clip_grad_norm": 0.5,
        "accumulate": ACCUMULATE,
    }
    return Recipe(**(settings | changes))


class Staged(shoal.Study):
    """A study that is run in stages by the command line too, which has no words for schedules."""

    schedule: Schedule = "flush"
    shards: int | None = None

    def run(self, **request: Any) -> shoal.Report:
        technique = request.pop("technique", None)
        how = {"shards": self.shards, "optimizer": "host"} if self.shards else {}
        technique = technique or shoal.Pipelined(stages=STAGES, schedule=self.schedule, **how)
        return super().run(technique=technique, **request)


def make(
    directory,
    *,
    lr=(1e-2, 3e-3),
    width=(WIDTH,),
    schedule: Schedule = "flush",
    shards: int | None = None,
    **options,
) -> Staged:
    """The study: 3 steps an epoch."""
    space = shoal.grid(lr=list(lr), width=list(width))
    settings = {"epochs": 4, "checkpoint_every": 0} | options
    study = Staged("k", recipe(), space=space, directory=directory, **settings)
    study.schedule, study.shards = schedule, shards
    return study


# -- what they end with ---------------------------------------------------------------------------


@functools.cache
def _alone(schedule: str, lr: float, width: int, seed: int, epochs: int, copies: int):
    train: Callable = plain_2bw_loop if schedule == "2bw" else plain_loop
    return train(recipe(), {"lr": lr, "width": width}, seed, epochs=epochs, copies=copies)


class _WithoutVersions:
    """A trial whose state has nothing that a plain loop's lacks."""

    def __init__(self, trial) -> None:
        self._trial = trial

    def __getattr__(self, name):
        return getattr(self._trial, name)

    def load_state(self):
        return without_versions(self._trial.load_state())


def check_alone(
    place: Path, schedule: str = "flush", epochs: int = 4, trials=None, copies: int = 1
) -> None:
    """These trials, or all, finished on the plain loop's bits: state, every loss, every metric."""
    report = shoal.open(place, recipe())
    losses = read_losses(place)
    for trial in report.trials:
        if trials is not None and trial.number not in trials:
            continue
        assert trial.state == "FINISHED", trial.error or trial
        hp = trial.hp
        plain = _alone(schedule, hp["lr"], hp["width"], trial.seed, epochs, copies)
        seen = _WithoutVersions(trial) if schedule == "2bw" else trial
        assert_same(plain, seen, losses=losses[trial.number])
