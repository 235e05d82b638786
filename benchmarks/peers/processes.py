"""What a process and its workers hold and have used, from Linux's own books."""

from __future__ import annotations

import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int | None = None) -> float:
    """User and system seconds of a process so far, all its threads."""
    fields = _proc(pid, "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def highest_bytes(pid: int) -> int:
    """The most that was ever resident of a process, libraries and shared memory included."""
    return _sizes(pid, "status").get("VmHWM", 0)


def own_bytes(pid: int | None = None) -> int:
    """Memory of a process that no file on disk backs: not its libraries.

    Of what it shares with others (a study's homes, what a forked worker has of its server) its
    part, so that the sum over a family counts each page once.
    """
    found = _sizes(pid, "smaps_rollup")
    return found.get("Pss_Anon", 0) + found.get("Pss_Shmem", 0)


def _sizes(pid: int | None, name: str) -> dict[str, int]:
    """The lines of a book that are sizes, in bytes."""
    lines = (line.split() for line in _proc(pid, name).read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def family(pid: int) -> list[int]:
    """A process, and of its children and theirs those that shoal started: servers and workers.

    Not what else it starts for an instant: DeepSpeed runs compilers to see what it could build.
    """
    return [pid, *(one for child in _children(pid) if _is_ours(child) for one in family(child))]


def _is_ours(pid: int) -> bool:
    try:
        return b"shoal." in _proc(pid, "cmdline").read_bytes()
    except OSError:
        return False


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except OSError:
        return []


def _proc(pid: int | None, name: str) -> Path:
    return Path("/proc") / ("self" if pid is None else str(pid)) / name


class MemoryWatch:
    """The memory of a process with shoal's workers, as often as ``look`` is called.

    ``peak_rss_bytes`` is the sum of each process's own highest resident set, libraries and
    shared memory counted in each. ``peak_own_bytes`` is the most at one time of what no file
    backs, shared memory once.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._highest: dict[int, int] = {}
        self.peak_own_bytes = 0

    def look(self) -> None:
        own = 0
        for pid in family(self._pid):
            try:
                own += own_bytes(pid)
                self._highest[pid] = max(self._highest.get(pid, 0), highest_bytes(pid))
            except OSError:
                continue  # it has ended
        self.peak_own_bytes = max(self.peak_own_bytes, own)

    @property
    def peak_rss_bytes(self) -> int:
        return sum(self._highest.values())
