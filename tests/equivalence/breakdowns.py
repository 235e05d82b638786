"""Trials of one shape of which some meet with a mishap at their third step.

``hp["mishap"]`` says which. Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import squads
import torch
from torch import nn
from torch.nn import functional as F

import shoal

MARK = 1e20  # a value that tells the model or the loss: now
WORDS = {  # a mishap, and what is said of it
    "nan": "loss of step 3 is nan",
    "target": "out of bounds",
    "loss": "ValueError: the loss gave up",
    "exit": "SystemExit: the loss left",
    "inside": "ValueError: the block gave up",
    "shape": "RuntimeError",
    "data": "OSError: the disk is gone",
    "metric": "ValueError: the metric gave up",
    "valid": "OSError: the disk is gone",
    "optimizer": "ValueError: the optimizer gave up",
    "schedule": "ValueError: the schedule gave up",
}


class Wary(nn.Module):
    """Asks its input, which differs from trial to trial."""

    def forward(self, x):
        if (x.abs() == 2 * MARK).any():
            raise ValueError("the block gave up")
        return x


def build(hp):
    return nn.Sequential(Wary(), nn.Dropout(0.1), *squads.mlp({"drop": hp["drop"]}))


def batches(count: int = 6, offset: int = 0):
    draws = torch.Generator().manual_seed(70 + offset)
    return [
        (
            torch.randn(4, squads.INSIDE, generator=draws, dtype=torch.float64),
            torch.randint(squads.CLASSES, (4,), generator=draws),
        )
        for _ in range(count)
    ]


class Source:
    """Ends with an error in a pass, before a batch; both counted from 0."""

    def __init__(self, found, in_pass: int = 99, before: int = 0, flag: str = "") -> None:
        self.found, self.in_pass, self.before, self.flag = found, in_pass, before, flag
        self.passes = 0

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self):
        here, self.passes = self.passes, self.passes + 1
        for index, batch in enumerate(self.found):
            if (here, index) == (self.in_pass, self.before) and not Path(self.flag).is_file():
                if self.flag:
                    Path(self.flag).touch()
                raise OSError("the disk is gone")
            yield batch


class Marked(Source):
    """Says at the second pass that it is one."""

    def __iter__(self):
        for x, y in super().__iter__():
            yield (x + MARK / 2 if self.passes == 2 else x), y


class Slow(Source):
    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.2)
            yield batch


def data(hp):
    mishap, train, valid = hp["mishap"], batches(), Source(batches(2, 1))
    x, y = train[2]
    if mishap == "nan":
        x.fill_(torch.nan)
    if mishap == "target":
        y[1] = 99
    if mishap == "first":
        train[0][1][1] = 99
    if mishap in ("loss", "exit", "inside"):
        x[0, 0] = MARK * {"loss": 1, "inside": 2, "exit": 3}[mishap]
    if mishap == "shape":
        train[2] = (x[:, :4], y)
    if mishap in ("data", "once"):
        return Source(train, 0, 2, hp.get("flag", "")), valid
    if mishap == "metric":
        return train, Marked(batches(2, 1))
    if mishap == "valid":
        return train, Source(batches(2, 1), 1, 1)
    return (Slow(train) if mishap == "slow" else train), valid


def loss(output, batch):
    x, y = batch
    if (x.abs() == MARK).any():
        raise ValueError("the loss gave up")
    if (x.abs() == 3 * MARK).any():
        sys.exit("the loss left")
    return F.cross_entropy(output, y)


def accuracy(output, batch):
    """Looks at examples by chance."""
    if batch[0].max() > MARK / 4:
        raise ValueError("the metric gave up")
    chosen = torch.randint(len(output), (3,))
    return (output.argmax(1) == batch[1])[chosen].double().mean().item()


class Fussy(torch.optim.SGD):
    """Gives up at a step."""

    def __init__(self, parameters, lr: float, until: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.param_groups[0] |= {"until": until, "count": 0}

    def step(self, closure=None):
        group = self.param_groups[0]
        group["count"] += 1
        if group["count"] > group["until"]:
            raise ValueError("the optimizer gave up")
        return super().step(closure)


def optimizer(named, hp):
    until = 2.0 if hp["mishap"] == "optimizer" else 1e9
    return Fussy([p for _, p in named], hp["lr"], until)


class Falling:
    """A factor that is wanted until the mishap."""

    def __init__(self, until: float) -> None:
        self.until = until

    def __call__(self, step: int) -> float:
        if step > self.until:
            raise ValueError("the schedule gave up")
        return 0.9**step


def schedule(optimizer, hp):
    until = 2.0 if hp["mishap"] == "schedule" else 1e9
    return torch.optim.lr_scheduler.LambdaLR(optimizer, Falling(until))


def recipe(**changes) -> shoal.Recipe:
    values = {"model": build, "data": data, "loss": loss, "schedule": schedule}
    values |= {"inputs": squads.points_in, "metrics": {"accuracy": accuracy}}
    values |= {"optimizer": optimizer}
    return shoal.Recipe(**(values | changes))
