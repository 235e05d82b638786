"""Every changing call of a scenario, times every fault: ``python -m faults.enumeration``.

A fork where the process is to die. What is left is looked at by one that meets no fault.
Run it from tests/chaos; ``--preload`` counts in libc and not in Python (faults/preload.py);
KILL and other names of faults choose some, NONE none; ``--twice`` has another process killed
before.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from faults.injector import KILLS, Fault, FaultyOs, installed, memory
from faults.power import materialize, snapshot
from faults.scenarios import SCENARIOS, Acknowledge, Ended, Scenario, killed_before

from shoal.core.errors import StorageError
from shoal.storage import files

NO_STORAGE_ERROR = "an error that is no StorageError"
LASTING = (Fault.DEAD, Fault.FULL)


class Injector(Protocol):
    """Where calls are counted and faults happen: in Python or in libc."""

    def no_syncs(self) -> AbstractContextManager[object]:
        """Inside, a sync costs nothing: no process that dies loses a page of the kernel's."""

    def calls(self, scenario: Scenario, root: Path) -> list[str]:
        """The names of the changing calls of a run without faults."""

    def arm(self, root: Path, point: int, fault: Fault) -> None:
        """Let the ``point``-th call from now on, under ``root``, meet ``fault``."""

    def disarm(self) -> None:
        """Let all calls succeed again."""


class PythonInjector:
    """Replaces ``os`` in ``shoal.storage.files``."""

    def no_syncs(self) -> AbstractContextManager[object]:
        return installed(FaultyOs(Path("/")))

    def calls(self, scenario: Scenario, root: Path) -> list[str]:
        with installed(FaultyOs(root)) as counting:
            scenario.act(root, lambda _: None)
        return counting.calls

    def arm(self, root: Path, point: int, fault: Fault) -> None:
        files.os = FaultyOs(root, point, fault)

    def disarm(self) -> None:
        files.os = FaultyOs(Path("/"))


@dataclass
class Tally:
    """What became of one scenario's points."""

    scenario: str
    calls: list[str]
    runs: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    @property
    def points(self) -> int:
        return len(self.calls)


def enumerate_points(
    scenario: Scenario,
    injector: Injector,
    faults: Iterable[Fault] = Fault,
    *,
    first_only: bool = False,
) -> Tally:
    """Run ``scenario`` once per point and fault that fits; ``first_only``: to a violation."""
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        base, root = Path(folder) / "base", Path(folder) / "root"
        base.mkdir()
        with injector.no_syncs():
            scenario.prepare(base)
            tree = snapshot(base)
            materialize(tree, root)
            tally = Tally(scenario.name, injector.calls(scenario, root))
            gc.freeze()  # a child copies fewer pages
            for point, fault in _points(tally.calls, faults):
                materialize(tree, root)
                ended = run(scenario, injector, root, point, fault)
                wrong = _judge(scenario, root, ended, fault)
                tally.runs[fault.name] += 1
                if wrong:
                    call = tally.calls[point - 1]
                    tally.violations.append(f"{fault.name} at {point} ({call}): {wrong}")
                    if first_only:
                        break
    return tally


def _points(calls: list[str], faults: Iterable[Fault]) -> Iterator[tuple[int, Fault]]:
    for fault in faults:
        for point, call in enumerate(calls, start=1):
            if fault.fits(call, is_last=point == len(calls)):
                yield point, fault


def run(scenario: Scenario, injector: Injector, root: Path, point: int, fault: Fault) -> Ended:
    """What was promised, and how it ended, when the ``point``-th call met ``fault``."""
    if fault in KILLS or scenario.forks:
        return _run_child(scenario, injector, root, point, fault)
    promises: list[str] = []
    injector.arm(root, point, fault)
    try:
        error = _attempt(scenario, root, promises.append)
    finally:
        injector.disarm()
    lasting = fault in LASTING
    return Ended(promised=tuple(promises), killed=False, lasting=lasting, error=error)


def _run_child(
    scenario: Scenario, injector: Injector, root: Path, point: int, fault: Fault
) -> Ended:
    reader, writer = os.pipe()
    say = os.write  # not the one of the module that is about to fail
    child = os.fork()
    if not child:
        injector.arm(root, point, fault)
        error = _attempt(scenario, root, lambda what: say(writer, f"+{what}\n".encode()) and None)
        say(writer, f"!{error}".encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        promises, _, error = pipe.read().decode().partition("!")
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    promised = tuple(line[1:] for line in promises.splitlines())
    return Ended(promised=promised, killed=killed, lasting=fault in LASTING, error=error)


def _attempt(scenario: Scenario, root: Path, acknowledge: Acknowledge) -> str:
    """The name of the error that a user of the package would see; "" for none."""
    try:
        scenario.act(root, acknowledge)
    except StorageError as error:
        return type(error).__name__
    except BaseException:
        return f"{NO_STORAGE_ERROR}: {traceback.format_exc(limit=-4)!r}"
    return ""


def _judge(scenario: Scenario, root: Path, ended: Ended, fault: Fault) -> str:
    """What is wrong with how a process ended, and with what it left."""
    try:
        return _wrong_end(scenario, ended, fault) or scenario.check(root, ended)
    except Exception as error:  # whatever it is, it is what the next process would meet
        return f"the next process fails: {error!r}"


def _wrong_end(scenario: Scenario, ended: Ended, fault: Fault) -> str:
    if ended.error.startswith(NO_STORAGE_ERROR):
        return ended.error
    if fault in KILLS and not ended.killed:
        return "it was not killed: the harness is broken"
    if fault in (Fault.SHORT, Fault.EINTR) and ended.error:
        return f"a write that can go on was reported as {ended.error}"
    if scenario.reports_all and fault not in KILLS | {Fault.SHORT, Fault.EINTR}:
        is_full = fault in (Fault.FULL, Fault.ENOSPC)
        expected = "DiskFull" if is_full else "FileError"
        if ended.error != expected:
            return f"{expected} was to be reported, and not {ended.error!r}"
    return ""


def table(tallies: list[Tally]) -> str:
    """Points and runs of each scenario, for people."""
    rows = [f"{'scenario':24} points  runs  by fault"]
    for tally in tallies:
        faults = " ".join(f"{name}:{count}" for name, count in tally.runs.items())
        rows.append(
            f"{tally.scenario:24} {tally.points:6} {tally.runs.total():5}  {faults}"
            + "".join(f"\n    WRONG {line}" for line in tally.violations)
        )
    points, runs = sum(t.points for t in tallies), sum(t.runs.total() for t in tallies)
    return "\n".join([*rows, f"{'all':24} {points:6} {runs:5}"])


def run_main(scenarios: Iterable[Scenario], injector: Injector, arguments: list[str]) -> int:
    """Run scenarios with the faults that are named, else with all, and say what came of it."""
    words = [word for word in arguments if not word.startswith("--")]
    named = [fault for fault in Fault if fault.name in words or not words]
    tallies = [enumerate_points(scenario, injector, named) for scenario in scenarios]
    found = json.dumps([vars(t) for t in tallies]) if "--json" in arguments else table(tallies)
    sys.stdout.write(found + "\n")
    return any(tally.violations for tally in tallies)


def main(arguments: list[str]) -> int:
    """The scenarios of ``shoal.storage``."""
    injector: Injector = PythonInjector()
    if "--preload" in arguments:
        from faults.preload import PreloadInjector  # needs the library in this process

        injector = PreloadInjector()
    chosen = map(killed_before, range(1, 27)) if "--twice" in arguments else SCENARIOS
    return run_main(chosen, injector, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
