"""``shoal run`` as a process of its own, which can be killed at chosen or random instants.

The study's file is written by ``Runner``; it installs a hook that the environment names:

    "kill before KIND"   the process group dies when an event of that kind is to be written
    "kill after KIND"    ... when it has been written
    "kill late"          ... when a generation is on disk whose last step is yet to be written
    "planning"           the planner waits for a signal
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import commands
import studies

from shoal.core.event import Event
from shoal.forkserver import WorkerProcess
from shoal.launch.sinks import Sinks
from shoal.observe import read_events

HOOK = "SHOAL_TEST_HOOK"
SERVER = "shoal.forkserver"
DEADLINE_S = 180.0
_FILE = """
import sys
sys.path.insert(0, {folder!r})
import processes, {maker}
processes.install_hook()
study = {maker}.make("runs", **{options!r})
"""


# -- in the study's process -------------------------------------------------------------------


def install_hook() -> None:
    """Do what the environment asks for."""
    order = os.environ.get(HOOK, "")
    if order == "planning":
        _wait_in_planning()
    elif order:
        _kill_at(order)


def _kill_at(order: str) -> None:
    write = Sinks.write
    _, when, *kind = order.split()

    def written(sinks: Sinks, happened) -> None:
        happened = list(happened)
        is_now = any(type(event).__name__ in kind for event in happened)
        if when == "late":
            _wait_for_generation(sinks, happened)
        if when == "before" and is_now:
            die()
        write(sinks, happened)
        if when == "after" and is_now:
            die()

    Sinks.write = written


def _wait_for_generation(sinks: Sinks, happened) -> None:
    """Die before the steps of a generation are written that is on disk already."""
    trials = sinks._database.path.parent / "trials"
    for event in happened:
        if type(event).__name__ == "StepFinished" and event.step == 7:
            saved, least = trials / f"{event.trial:04d}", f"step-{event.step:08d}"
            until(partial(_has_one_from, saved, least), f"nothing from {least} on in {saved}")
            die()


def _has_one_from(saved: Path, least: str) -> bool:
    """A later generation serves as well: the first may be let go before anybody looks."""
    names = [path.name for path in saved.glob("step-*") if path.suffix != ".tmp"]
    return any(name[: len(least)] >= least for name in names)


def _wait_in_planning() -> None:
    write = Sinks.write

    def written(sinks: Sinks, happened) -> None:
        write(sinks, happened)
        if any(type(event).__name__ == "StudyStarted" for event in happened):
            Path("planning").touch()
            while True:  # a signal just before a pause would be lost
                time.sleep(0.01)

    Sinks.write = written


def die() -> None:
    os.killpg(0, signal.SIGKILL)


# -- in the test's ----------------------------------------------------------------------------


_STARTED: list[Process] = []


def reap_all() -> None:
    """End what a test that failed left running."""
    while _STARTED:
        _STARTED.pop().reap()


def until(is_so: Callable[[], object], otherwise: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition; a test that waits in vain says for what."""
    end = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < end, otherwise
        time.sleep(0.01)


class Runner:
    """Runs one study's file in processes, one after the other.

    ``options`` are of ``make`` in the module ``maker``; the study lies in ``place``.
    """

    def __init__(
        self, folder: Path, *, devices: int = studies.DEVICES, maker: str = "studies", **options
    ) -> None:
        self.folder, self.place = folder, folder / "runs" / "k"
        self.file, self.errors = folder / "study.py", folder / "errors.txt"
        self.printed = folder / "printed.txt"
        text = _FILE.format(folder=str(Path(__file__).parent), maker=maker, options=options)
        self.file.write_text(text)
        self._devices = devices

    def start(
        self, hook: str = "", *, verb: str = "run", words: Sequence[str] = (), **environment: str
    ) -> Process:
        """A process in a session of its own; ``words`` follow the study's name."""
        what = str(self.file) if verb == "run" else "k"
        flags = [*words, "--devices", f"cpu:{self._devices}", "--device-memory", studies.MEMORY]
        with self.errors.open("ab") as errors, self.printed.open("ab") as printed:
            given = os.environ | {HOOK: hook} | environment
            words = [verb, what, *flags]
            process = commands.start(words, printed.fileno(), errors.fileno(), given, self.folder)
        started = Process(process, self)
        _STARTED.append(started)
        return started

    def run(self, hook: str = "", **environment: str) -> int:
        """A process to its end; its exit code."""
        return self.start(hook, **environment).wait()

    def events(self) -> list[Event]:
        """What is on record now."""
        return list(read_events(self.place)) if self.place.exists() else []

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events()]

    def words(self) -> str:
        """The end of what all processes said."""
        return self.errors.read_text(errors="replace")[-4000:]


class Process:
    """A study's process and all that it started."""

    def __init__(self, process: WorkerProcess, runner: Runner) -> None:
        self._process, self._runner = process, runner
        self.pid = process.pid

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Its exit code; a process that hangs is killed."""
        try:
            return self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it hangs:\n{self._runner.words()}") from None

    def is_over_after(self, seconds: float) -> bool:
        """Whether it ended by itself within this time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.pid, number)

    def send_to(self, pid: int, number: signal.Signals) -> None:
        """Send it to one process of the session."""
        assert pid in self.members()
        os.kill(pid, number)

    def kill_a_worker(self, draw: random.Random | None = None) -> bool:
        """End one that lives, if one does; the study goes on with another."""
        workers = sorted(self.workers())
        if not workers:
            return False
        worker = draw.choice(workers) if draw else workers[0]
        with suppress(ProcessLookupError):  # it ended by itself meanwhile
            os.kill(worker, signal.SIGKILL)
        until(lambda: worker not in self.members(), f"worker {worker} outlives its kill")
        return True

    def kill(self) -> None:
        """Kill -9 of the whole tree."""
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def reap(self) -> None:
        """Leave nothing of it behind, whatever became of its test."""
        if self._process.poll() is None:
            self.kill()

    def wait_for(self, kind: str, count: int = 1, *, or_end: bool = False) -> None:
        """Until so many events of a kind were written by this run, ``or_end`` of the run."""

        def is_there() -> bool:
            if self._process.poll() is not None:
                assert or_end, f"it ended early:\n{self._runner.words()}"
                return True
            kinds = self._runner.kinds()
            return kinds.count(kind) >= self._before(kinds, kind) + count

        until(is_there, f"no {kind} came:\n{self._runner.words()}")

    def _before(self, kinds: list[str], kind: str) -> int:
        """How many events of the kind there were when this process began to look."""
        known: dict[str, int] = self.__dict__.setdefault("_known", {})
        return known.setdefault(kind, kinds.count(kind))

    def members(self) -> dict[int, str]:
        """The live processes of its session, and their command lines."""
        return {pid: one.words for pid, one in _processes().items() if one.session == self.pid}

    def workers(self) -> set[int]:
        """Those of its devices; a loader's process is a worker's."""
        return workers_of(self.pid)

    def check_nothing_left(self) -> None:
        """No process of the session lives; a loader's worker may take seconds to notice."""
        until(lambda: not self.members(), f"left over: {self.members()}", deadline_s=20.0)


class _Process(NamedTuple):
    parent: int
    session: int
    words: str  # its command line


def workers_of(parent: int) -> set[int]:
    """Whom its server has forked, or beside a GPU it has started, as the system sees them."""
    found = _processes()
    children = {pid: one.words for pid, one in found.items() if one.parent == parent}
    servers = {pid for pid, words in children.items() if SERVER in words}
    forked = {pid for pid, one in found.items() if one.parent in servers}
    return forked | {pid for pid, words in children.items() if words.count(".worker ")}


def _processes() -> dict[int, _Process]:
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = entry.joinpath("stat").read_text().rpartition(")")[2].split()
            words = entry.joinpath("cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):  # it ended
            continue
        state, parent, _, session = fields[:4]
        if state != "Z":
            found[int(entry.name)] = _Process(int(parent), int(session), words)
    return found


def shared_memory() -> set[str]:
    """What torch and shoal have in the system's shared memory, by name.

    A name without memory does not count: torch removes the name of what it shares before
    it fills it, and a kill between the two leaves nothing but that.
    """
    found = set()
    for pattern in ("torch_*", "shoal*", "psm_*"):
        for path in Path("/dev/shm").glob(pattern):
            with suppress(FileNotFoundError):
                found |= {path.name} if path.stat().st_blocks else set()
    return found
