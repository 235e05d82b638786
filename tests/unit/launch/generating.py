"""Generations and events as trials write them, made in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.core.event import TrialPlanned
from shoal.runtime.saving import checkpoint
from shoal.storage.generations import Generation

PAIR = ("a", "F32", (2,), b"\0" * 8)


def generate(study: Path, trial: int, step: int, *, state: bool = True, **meta: Any) -> Generation:
    """A generation of two numbers; ``meta`` beside what every one has."""
    known = {"trial": trial, "ended": False, "length": 4, "metrics": {}, "numerics": {}}
    with checkpoint.generations(study, trial, keep=9).begin(step) as draft:
        draft.tensors(checkpoint.WEIGHTS, [PAIR])
        if state:
            draft.tensors(checkpoint.STATE, [PAIR])
        return draft.commit(**{**known, **meta})


def steps(study: Path, trial: int) -> list[int]:
    """The steps of a trial's generations, oldest first."""
    return [generation.step for generation in checkpoint.generations(study, trial).all()]


def planned(trial: int = 0) -> TrialPlanned:
    """The event that makes a trial known."""
    return TrialPlanned(
        time=0.0,
        trial=trial,
        hp={},
        seed=0,
        technique="Resident",
        shards=1,
        steps=4,
        peak_bytes=0,
        numerics={},
    )
