"""Chunked steps on the host for tests: recipes, a slow optimizer, one that meets with an accident.

Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import traps
from torch import nn

import shoal

FAILS_AT = 4  # the step in which an accident happens


class Accidental(torch.optim.AdamW):
    """Meets with ``hp["accident"]`` where it steps one tensor of the last layer: in mid-shard."""

    def __init__(self, parameters: Any, accident: str, flag: str, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group["accident"], group["flag"] = accident, flag

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        stepped = [p for group in self.param_groups for p in group["params"]]
        if len(stepped) == 1 and stepped[0].shape == (3, traps.WIDTH):
            self._happen(self.param_groups[0], int(self.state[stepped[0]]["step"]))
        return result

    def _happen(self, group: dict[str, Any], step: int) -> None:
        flag, accident = Path(group["flag"]), group["accident"]
        if accident == "none" or step < FAILS_AT or flag.exists():
            return
        if accident != "raise again":
            flag.touch()
        if accident == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"the optimizer gave up at step {step}")


def accidental(named_parameters: Any, hp: Any) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in named_parameters]
    return Accidental(parameters, hp["accident"], hp["flag"], hp["lr"])


class Slow(torch.optim.AdamW):
    """Takes its time over every tensor, as a step of a large one does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        time.sleep(sum(2e-3 for group in self.param_groups for _ in group["params"]))
        return super().step(closure)


def slow(named_parameters: Any, hp: Any) -> torch.optim.Optimizer:
    return Slow([parameter for _, parameter in named_parameters], lr=hp["lr"])


def chain(hp: Any) -> nn.Module:
    return traps.Chain()


def recipe(**changes: Any) -> shoal.Recipe:
    settings = {"model": chain, "data": traps.data, "loss": traps.loss, "optimizer": traps.adamw}
    return shoal.Recipe(**(settings | changes))


def tower(hp: Any) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(hp["depth"])]
    return nn.Sequential(nn.Linear(12, 16), *blocks, nn.Linear(16, 3))
