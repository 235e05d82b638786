"""Runs of the real protocol, recorded for faults/power.py: whole, or killed and started again."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from faults import power
from faults.injector import Fault, Killed, Played, installed
from faults.scenarios import TRIAL, Scenario, commit, newest_step

from shoal.storage.generations import Generations

Act = Callable[[Path, Callable[[str], None]], None]


@dataclass(frozen=True)
class Recording:
    """What processes did to a directory, one after the other; ``order``: what may be found."""

    name: str
    base: power.Tree
    trace: power.Trace
    root: str
    order: list[str]

    def without(self, number: int) -> Recording:
        """The same, had the ``number``-th call not been made."""
        return replace(self, trace=self.trace[:number] + self.trace[number + 1 :])

    def syncs(self) -> dict[int, str]:
        """Where in the trace is a sync, and who makes it, of what."""
        return {
            number: f"{call[2]} of {_kind(call[1].removeprefix(self.root).strip('/'))}"
            for number, call in enumerate(self.trace)
            if call[0] == "sync"
        }


def _kind(path: str) -> str:
    """A path without its numbers: what sort of thing it is."""
    return re.sub(r"[0-9]+", "N", path) or "the study"


def record(
    name: str, scenario: Scenario, root: Path, order: list[str], *more: Act, kill_at: int = 0
) -> Recording:
    """Prepare ``scenario``, run it, and then each of ``more`` as a process of its own.

    The first process is killed after its ``kill_at``-th call, if that is not 0.
    """
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    with installed(Played(root)):
        scenario.prepare(root)
    base = power.snapshot(root)
    trace: power.Trace = []
    for number, act in enumerate((scenario.act, *more)):
        fault = Fault.KILL_AFTER if kill_at and not number else None
        with installed(Played(root, kill_at, fault)) as process:
            try:
                act(root, process.say)
            except Killed:
                assert fault, "only the first process is killed"
        trace += process.trace
    return Recording(name, base, trace, str(root), order)


def calls_of(scenario: Scenario, root: Path) -> list[str]:
    """The names of the changing calls of a scenario, in order."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    with installed(Played(root)):
        scenario.prepare(root)
    with installed(Played(root)) as process:
        scenario.act(root, lambda _: None)
    return process.calls


def collect_again(root: Path, _: Callable[[str], None]) -> None:
    """A process that starts, and first makes room."""
    Generations(root / TRIAL, keep=1).collect()


def go_on(root: Path, promise: Callable[[str], None]) -> None:
    """A process that starts, and writes the next checkpoint."""
    generations = Generations(root / TRIAL, keep=1)
    generations.newest()
    commit(generations, 1600)
    promise("1600")
    generations.collect()


def read_newest(root: Path) -> str:
    """What ``Recording.order`` names: the step that a reader finds."""
    return str(newest_step(root, []))


def judge(
    recording: Recording, model: power.Model, scratch: Path, *, first_only: bool = False
) -> tuple[int, list[str]]:
    """How many states a failure may leave, and which of them break a promise."""
    found = power.states(recording.base, recording.trace, recording.root, model)
    return power.violations(found, scratch, read_newest, recording.order, first_only=first_only)
