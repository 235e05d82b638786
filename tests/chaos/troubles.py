"""Trials that get into trouble while they train: too large a batch, a hang, a death.

Imported by tests and, by this name, by worker processes. ``hp["flag"]`` is a file that says
whether something has happened already: then it does not happen again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from shoal.recipes.recipe import Recipe
from shoal.runtime.measuring import describe
from shoal.runtime.seats.parking import Parking

WIDTH, ROWS, FEATURES = 64, 4, 12
MARK = 999.0  # the value that tells the model: now


class Tower(nn.Module):
    """Six dropout blocks; ``trouble`` is what a marked batch sets off."""

    def __init__(self, width: int = WIDTH, trouble: str = "", flag: str = "") -> None:
        super().__init__()
        self.trouble, self.flag = trouble, flag
        self.enter = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2)) for _ in range(6)
        )
        self.leave = nn.Linear(width, 3)

    def forward(self, x):
        if self.trouble == "sleep":
            time.sleep(0.03)  # so that each step is told of at once
        marked = bool((x[:, 0] == MARK).any())
        x = self.enter(x / MARK if marked else x)
        for index, block in enumerate(self.blocks):
            if marked and index == 1:
                happen(self.trouble, self.flag)
            x = block(x)
        return self.leave(x)


def happen(trouble: str, flag: str) -> None:
    """What a marked batch does; troubles with a flag happen once."""
    if flag and Path(flag).exists():
        return
    if flag:
        Path(flag).touch()
    if trouble == "raise":
        raise RuntimeError("the model gave up")
    if trouble == "sleep":
        while True:
            time.sleep(0.01)
    if trouble == "sleep in C":
        libc = ctypes.PyDLL(None)  # which keeps the interpreter's lock
        while True:
            libc.sleep(1000)
    if trouble == "stopped process":
        os.kill(os.getpid(), signal.SIGSTOP)
    if trouble == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if trouble == "long step":
        time.sleep(1.5)


class Deadlocked:
    """A source that waits for ever before its third batch, once."""

    def __init__(self, batches, flag: str) -> None:
        self.batches, self.flag = batches, Path(flag)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        for index, batch in enumerate(self.batches):
            if index == 2 and not self.flag.exists():
                self.flag.touch()
                lock = threading.Lock()
                lock.acquire()
                lock.acquire()
            yield batch


def batch(index: int, rows: int = ROWS):
    generator = torch.Generator().manual_seed(70 + index)
    features = torch.randn(rows, FEATURES, generator=generator)
    return features, torch.randint(3, (rows,), generator=generator)


def build(hp):
    if hp.get("trouble") == "exit in build":
        os._exit(3)
    return Tower(hp.get("width", WIDTH), hp.get("trouble", ""), hp.get("flag", ""))


def data(hp):
    """Six batches; the third one has ``hp["rows"]`` rows, and the trouble's mark."""
    batches = [batch(index, hp.get("rows", ROWS) if index == 2 else ROWS) for index in range(6)]
    if hp.get("trouble") == "deadlock":
        return Deadlocked(batches, hp["flag"]), None
    if hp.get("trouble"):
        batches[2][0][0, 0] = MARK
    return batches, [batch(9)]


class Deadly:
    """A source that ends its process in its second epoch, each time."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self):
        self.epoch += 1
        for index in range(3):
            if self.epoch == 2 and index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch(index)


def build_calm(hp):
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 3))


def deadly_to_some(hp):
    return Deadly() if hp["trouble"] else [batch(index) for index in range(3)], None


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def adamw(named_parameters, hp):
    parameters = [parameter for _, parameter in named_parameters]
    return torch.optim.AdamW(parameters, lr=hp["lr"], fused=True)


def falling(optimizer, hp):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)


def recipe(**changes) -> Recipe:
    return Recipe(**({"model": build, "data": data, "loss": loss, "optimizer": adamw} | changes))


# -- other recipes ------------------------------------------------------------------------------


def build_slowly(hp):
    """Takes longer than a hang may, wherever it is built."""
    time.sleep(1.2)
    return build(hp)


class DeadlyData:
    """Ends its process before its second, fourth and sixth batch, once each."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def __len__(self) -> int:
        return 6

    def __iter__(self):
        for index in range(6):
            flag = Path(f"{self.flag}-{index}")
            if index % 2 and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch(index)


def deadly_data(hp):
    return DeadlyData(hp["flag"]), None


class Fragile:
    """A loss that cannot be loaded once its flag is there."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def __setstate__(self, state) -> None:
        self.__dict__.update(state)
        if Path(self.flag).exists():
            raise ImportError("the module of the loss is gone")

    def __call__(self, output, batch):
        return loss(output, batch)


class DataThatEndsEarly:
    """One batch, and then an error."""

    def __iter__(self):
        yield batch(0)
        raise OSError("the disk is gone")


def data_that_ends_early(hp):
    return DataThatEndsEarly(), None


def data_that_ends_at_will(hp):
    return data_that_ends_early(hp) if hp["ends"] else data(hp)


# -- while the study is planned -------------------------------------------------------------------


def build_stuck(hp):
    """Where ``hp["where"]`` says so, the trouble happens while the model is built."""
    if hp["where"] == "model":
        happen(hp["trouble"], hp["flag"])
    model = Tower(hp.get("width", WIDTH))
    if hp["where"] == "forward":
        model.enter.register_forward_pre_hook(lambda *_: happen(hp["trouble"], hp["flag"]))
    return model


class StuckBatches(list):
    """Batches before the first of which something happens."""

    def __init__(self, batches, work) -> None:
        super().__init__(batches)
        self.work = work

    def __iter__(self):
        self.work()
        return super().__iter__()


def data_stuck(hp):
    batches = [batch(index) for index in range(6)]
    if hp["where"] == "data":
        happen(hp["trouble"], hp["flag"])
    if hp["where"] == "batch":
        return StuckBatches(batches, lambda: happen(hp["trouble"], hp["flag"])), None
    return batches, None


def stuck_recipe(**changes) -> Recipe:
    return recipe(model=build_stuck, data=data_stuck, **changes)


class StuckWhenLoaded:
    """A loss that hangs the worker that loads it, before any trial's code runs."""

    def __reduce__(self):
        return happen, ("sleep", "")

    def __call__(self, output, batch):
        return loss(output, batch)


# -- an error of shoal's own --------------------------------------------------------------------


def broken_recipe(**changes) -> Recipe:
    """Of trials for whom ``hp["breaks"]`` says when shoal's own code in the worker raises."""
    return recipe(model=build_broken, data=data_broken, **changes)


def build_broken(hp):
    if hp["breaks"] == "plan":
        describe.own_traceback = None
        raise ValueError("what shoal cannot tell of")
    return build({**hp, "trouble": ""})


def data_broken(hp):
    batches, valid = data({**hp, "trouble": ""})
    return BreaksWhenTrained(batches) if hp["breaks"] == "run" else batches, valid


class BreaksWhenTrained(list):
    """Batches that break the loop of the device which trains with them."""

    def __iter__(self):
        frame, callers = sys._getframe(), set()
        while frame is not None:
            callers.add(frame.f_code.co_name)
            frame = frame.f_back
        if "_guard" in callers:
            Parking.refuse = None
            raise ValueError("what shoal cannot tell of")
        return super().__iter__()
