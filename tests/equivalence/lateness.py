"""Losses that come late, as from a GPU, and what is waited for; in workers that have no GPU.

Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import accidents
import torch

from shoal.recipes.recipe import Recipe
from shoal.runtime import session


class Late:
    """Numbers that are not here before they were waited for; what happens is written down."""

    def __init__(self, log: str) -> None:
        self._log, self._sent, self._is_here = log, {}, True

    def send(self, index, value):
        write(self._log, "note")
        self._sent[index], self._is_here = value.detach().clone(), False

    def wait(self):
        write(self._log, "wait")
        self._is_here = True

    def read(self, index):
        assert self._is_here
        return self._sent[index].item()


class Written(torch.optim.AdamW):
    """Writes its steps down."""

    log = ""

    def step(self, closure=None):
        write(self.log, "step")
        return super().step(closure)


def write(log: str, word: str) -> None:
    with Path(log).open("a") as file:
        file.write(f"{word}\n")


def log_of(hp) -> str:
    return str(Path(hp["folder"]) / hp["accident"])


def model(hp):
    """A trial's; in a worker, whose losses come late from then on."""
    if os.getpid() != hp["tests"]:
        session.readback_of = lambda device, places: Late(log_of(hp))
    return accidents.build(hp)


def optimizer(named_parameters, hp):
    made = Written([parameter for _, parameter in named_parameters], lr=hp["lr"])
    made.log = log_of(hp) if os.getpid() != hp["tests"] else os.devnull
    return made


def recipe(**options) -> Recipe:
    how = {"accumulate": 2, "clip_grad_norm": None, **options}
    return replace(accidents.recipe(), model=model, optimizer=optimizer, **how)


def steps_of(log: str) -> list[list[str]]:
    """What happened in each training step, from its first loss on."""
    words = Path(log).read_text().split()
    steps = [[]]
    for word in words[words.index("note") :]:
        if word == "note" and steps[-1] and steps[-1][-1] != "note":
            steps.append([])
        steps[-1].append(word)
    return steps
