"""The study's database under faults: ``python -m faults.database``, started with the library.

Name the faults: a sync that takes the whole file with it (LOST) is beyond any database.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from faults.enumeration import run_main
from faults.preload import PreloadInjector
from faults.scenarios import Acknowledge, Ended, Scenario

from shoal.core.event import Evaluated, Event, StepFinished, TrialParked, TrialStarted
from shoal.observe.db import Database
from shoal.observe.reader import read_events

WRITTEN_BEFORE, BATCHES = 2, 5


def batch(number: int) -> list[Event]:
    """Rows for each table; every other batch has an event that asks for a sync."""
    time, trial = float(number), number
    rows: list[Event] = [
        StepFinished(
            time=time, trial=trial, step=1, epoch=0, loss=0.5, seconds=0.1, device="cpu:0"
        ),
        Evaluated(time=time, trial=trial, step=1, epoch=0, metrics={"valid_loss": 0.25}),
    ]
    if number % 2:
        return [*rows, TrialStarted(time=time, trial=trial, device="cpu:0")]
    return [*rows, TrialParked(time=time, trial=trial, step=1)]


def _prepare(root: Path) -> None:
    with Database(root) as database:
        for number in range(WRITTEN_BEFORE):
            database.write(batch(number))


def _prepare_nothing(root: Path) -> None:
    """The study's first process makes the database."""


def _write_from(start: int) -> Scenario:
    """A process opens the study, writes batches, and closes it."""

    def act(root: Path, acknowledge: Acknowledge) -> None:
        with Database(root) as database:
            for number in range(start, BATCHES):
                database.write(batch(number))
                acknowledge(str(number))

    def check(root: Path, ended: Ended) -> str:
        found = _whole_batches(root)
        promised = start + len(ended.promised)
        if not promised <= found <= min(promised + 1, BATCHES):
            return f"{found} batches are there, {promised} were promised"
        with Database(root) as database:
            database.write(batch(found))
        is_sound = _whole_batches(root) == found + 1 and _is_sound(root)
        return "" if is_sound else "it cannot be written any more"

    return Scenario(
        name="the database" if start else "a new database",
        prepare=_prepare if start else _prepare_nothing,
        act=act,
        check=check,
        forks=True,
        reports_all=False,  # not what closing could not tidy up, nor a name in a lock
    )


def _whole_batches(root: Path) -> int:
    """How many batches a reader finds, none of them in part; -1 when something else is there."""
    found = list(read_events(root))
    count = len(found) // len(batch(0))
    expected = [event for number in range(count) for event in batch(number)]
    return count if found == expected else -1


def _is_sound(root: Path) -> bool:
    with closing(sqlite3.connect(root / "study.db")) as connection:
        return connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


SCENARIOS = (_write_from(WRITTEN_BEFORE), _write_from(0))

if __name__ == "__main__":
    chosen = SCENARIOS[:1] if "--fast" in sys.argv else SCENARIOS
    sys.exit(run_main(chosen, PreloadInjector(), sys.argv[1:]))
