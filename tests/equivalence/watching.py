"""Spilled trials that are watched while they train, and models and plans for them.

Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import traps
from torch import nn

import shoal
from shoal.core.event import ActionFinished, Event, PeakMeasured

STEPS = 5


@dataclass
class Watched:
    """The actions of a study's trials, and the peaks of their devices; a callback."""

    actions: list[ActionFinished] = field(default_factory=list)
    peaks: list[PeakMeasured] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if isinstance(event, ActionFinished):
            self.actions.append(event)
        elif isinstance(event, PeakMeasured):
            self.peaks.append(event)

    @property
    def words(self) -> list[str]:
        """The text of every action."""
        return [event.action for event in self.actions]

    @property
    def first_step(self) -> list[str]:
        """The text of every action of the first trial's first step."""
        return [e.action for e in self.actions if e.step == 1 and e.trial == 0]

    def that_end_with(self, word: str) -> dict[int, list[ActionFinished]]:
        """Actions whose text does so, by trial."""
        found = defaultdict(list)
        for event in self.actions:
            if event.action.endswith(word):
                found[event.trial].append(event)
        return found

    def bytes_of(self, word: str) -> dict[str, list[int]]:
        """What moved with the actions whose text ends so, by text."""
        found = defaultdict(list)
        for event in self.actions:
            if event.action.endswith(word):
                found[event.action].append(event.bytes)
        return found

    def bytes_a_step(self, kind: str) -> dict[int, int]:
        """What moved with actions of a kind, by step."""
        found: dict[int, int] = defaultdict(int)
        for event in self.actions:
            if event.action.startswith(kind):
                found[event.step] += event.bytes
        return found

    def bytes_by_kind(self) -> dict[str, int]:
        """All that moved, by the first word of the actions."""
        found: dict[str, int] = defaultdict(int)
        for event in self.actions:
            found[event.action.split()[0]] += event.bytes
        return found

    def assert_no_peak_was_above_what_was_predicted(self) -> None:
        over = [p for p in self.peaks if p.peak_bytes > p.predicted_bytes]
        assert not over, f"above what was predicted: {over}"


# ------------------------------------------------------------------ models and plans


def space_of(model: str, optimizer: str = "adamw", **more: Any) -> Any:
    """Two trials of a model of ``zoo``."""
    return shoal.grid(model=[model], optimizer=[optimizer], lr=[1e-2, 3e-3], **more)


def rates(count: int = 2) -> Any:
    return shoal.grid(lr=[1e-2, 3e-3, 1e-3][:count])


def chain(**changes: Any) -> shoal.Recipe:
    """Eight layers that draw nothing."""
    settings = {"model": blocks, "data": traps.data, "loss": traps.loss, "optimizer": traps.adamw}
    return shoal.Recipe(**(settings | changes))


def blocks(hp: Any) -> nn.Module:
    inner = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(nn.Linear(12, 16), *inner, nn.Linear(16, 3))


def plan_of(recipe: shoal.Recipe, space: Any, directory: Any, technique: Any, memory: Any) -> Any:
    """The plan of one trial on one device."""
    hardware = shoal.Hardware.virtual(devices=1, memory=memory)
    study = shoal.Study("study", recipe, space=space, trials=1, steps=2, directory=directory)
    return study.plan(hardware=hardware, technique=technique)


def settled(optimizer: str) -> shoal.Spilled:
    """A technique that leaves nothing open that a clock would decide: what fits alone does."""
    return shoal.Spilled(
        shards=5, optimizer=optimizer, keep=(), lookahead=0, lookbehind=0, recompute=True
    )
