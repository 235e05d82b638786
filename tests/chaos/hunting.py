"""Traps laid for the workers of gangs at chosen moments; what is left in processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import staged
from listening import Heard
from processes import Runner, shared_memory, until

from shoal.core.event import CheckpointWritten, Event, StepFinished, TrialStarted, WorkerStarted
from shoal.observe import read_events
from shoal.runtime.pool import WorkerPool


class Hunter:
    """Lays traps for the workers of stages when something happens; a callback."""

    def __init__(self, traps: Path, heard: Heard) -> None:
        self.folder, self._heard = traps, heard
        self._waiting: list[tuple[Callable[[Event], bool], Callable[[], None]]] = []

    def pid(self, device: str) -> int:
        """Of the worker that the device has now."""
        return {e.device: e.pid for e in self._heard.of(WorkerStarted)}[device]

    def at(self, happens: Callable[[Event], bool], work: Callable[[], None]) -> None:
        """Do it once, when this is true of an event."""
        self._waiting.append((happens, work))

    def lay(self, device: str, point: str, what: str, nth: int = 1) -> None:
        """Trap the device's worker."""
        staged.lay(self.folder, point, self.pid(device), what, nth)

    def kill(self, device: str, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid(device), number)

    def __call__(self, event: Event) -> None:
        for entry in [entry for entry in self._waiting if entry[0](event)]:
            self._waiting.remove(entry)
            entry[1]()

    def check_over(self) -> None:
        """Everything came, and nobody is left who would step into a trap."""
        assert not self._waiting, "a moment never came"
        assert not list(self.folder.glob("*-*")), "a trap is left"


def at_step(trial: int, step: int) -> Callable[[Event], bool]:
    return lambda e: isinstance(e, StepFinished) and e.trial == trial and e.step >= step


def began(trial: int) -> Callable[[Event], bool]:
    return lambda e: isinstance(e, TrialStarted) and e.trial == trial


def sockets(pid: int) -> int:
    """How many a process has."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += os.readlink(entry).startswith("socket:")
        except OSError:
            continue
    return found


def names_of_threads(pid: int) -> list[str]:
    return sorted(path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm"))


def check_nothing_left(workers: WorkerPool, study: str) -> None:
    """A worker that is idle has its own socket, no links and no trial's memory."""

    def is_clean(pid: int) -> bool:
        maps = Path(f"/proc/{pid}/maps").read_text()
        links = [name for name in names_of_threads(pid) if name.startswith(("to-", "from-"))]
        return sockets(pid) == 1 and f"memfd:{study}-" not in maps and not links

    for worker in workers._idle:
        if worker.alive:
            until(
                lambda pid=worker.pid: is_clean(pid),
                f"left in {worker.pid}: {sockets(worker.pid)} sockets, "
                f"{names_of_threads(worker.pid)}",
                deadline_s=10.0,
            )


@contextmanager
def leaving_nothing(workers: WorkerPool, study: str, devices: int) -> Iterator[None]:
    """What runs inside leaves nothing of the study in any process, however it ends."""
    shared = shared_memory()
    workers.warm(devices)
    ours = sockets(os.getpid())
    try:
        yield
    finally:
        check_nothing_left(workers, study)
        assert sockets(os.getpid()) <= ours + devices  # of a worker that was started anew
        assert shared_memory() <= shared


def check_clean(runner: Runner, shared: set[str]) -> None:
    """Nothing hinders anybody: no socket, no half-written file, no memory."""
    left = {path.name for path in runner.place.iterdir()}
    assert not left & {"control.sock", "reserve", "study.db-wal", "study.db-shm"}
    assert not list(runner.place.glob("trials/*/*.tmp"))
    until(lambda: shared_memory() <= shared, "shared memory is left", deadline_s=20.0)


def check_saved(place: Path) -> None:
    """What is on record as done is on the disk."""
    events = list(read_events(place))
    done = {e.trial: e.step for e in events if isinstance(e, StepFinished)}
    assert done == {e.trial: e.step for e in events if isinstance(e, CheckpointWritten)}
