"""Optimizers that end, hang or fail the stage that owns the last layer, in their second step.

Imported by tests and, by this name, by the processes of stages.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.recipes.recipe import Recipe

CLASSES = 3


class Stopping(torch.optim.SGD):
    """SGD; ``how`` is what becomes of the stage: "kill", "hang", "raise", or nothing."""

    how = ""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            is_head = any(p.dim() == 2 and p.shape[0] == CLASSES for p in group["params"])
            if is_head and group["calls"] == 2:
                self._stop()
        return super().step(closure)

    def _stop(self) -> None:
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "raise":
            raise RuntimeError("the head has gone wrong")
        if self.how == "hang":
            if "SHOAL_TEST_PIDS" in os.environ:
                (Path(os.environ["SHOAL_TEST_PIDS"]) / str(os.getpid())).touch()
            time.sleep(3600)


def optimizer(named_parameters, hp, how):
    made = Stopping([p for _, p in named_parameters], lr=0.1)
    made.how = how
    return made


def model(hp):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, CLASSES))


def data(hp):
    generator = torch.Generator().manual_seed(1)
    scale = float(hp.get("scale", 1.0))
    x = torch.randn(8, 4, 6, generator=generator) * scale
    return [(batch, torch.zeros(4, dtype=torch.long)) for batch in x], None


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def recipe(how: str = "", **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "model": model,
        "data": data,
        "loss": loss,
        "optimizer": partial(optimizer, how=how),
        "accumulate": 4,
    }
    return Recipe(**(settings | changes))


def sleep(place: Any) -> None:
    """What a stage does that never comes to its first action."""
    time.sleep(3600)
