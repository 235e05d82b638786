"""The state of a trial's best evaluation, which ``Study(keep_best=True)`` keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shoal.core.errors import SpecError, StorageError
from shoal.launch.directory import read_record
from shoal.observe.snapshot import Snapshot
from shoal.report import TrialResult
from shoal.testing import PlainTrial


def keeps_best(place: Path) -> bool:
    """Whether the study was asked to keep them; not where its record is gone or damaged."""
    try:
        record = read_record(place)
    except (SpecError, StorageError):
        return False
    return record is not None and bool(record.checkpoint.get("keep_best"))


def best_of(trial: TrialResult, snapshot: Snapshot, last: int) -> TrialResult | None:
    """The trial as of its best evaluation; None where that is its ``last`` step, or none was."""
    found = trial.at_best(snapshot.metric, snapshot.mode)
    return found if found.is_at_best and step_of(found) != last else None


def step_of(best: TrialResult) -> int:
    """After which step it was evaluated so."""
    return int(best.history[-1]["step"])


def as_of(population: Mapping[int, PlainTrial], number: int, step: int) -> dict[int, PlainTrial]:
    """The trials, of which one has not gone on, nor got another seat, after its evaluation at a
    step."""
    one = population[number]
    inherits = {at: source for at, source in one.inherits.items() if at < step}
    later = tuple(seat for seat in one.later if seat[0] < step)
    return {**population, number: replace(one, inherits=inherits, later=later)}
