"""What a process and its workers hold and have used, from Linux's own books."""

from __future__ import annotations

import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int | None = None) -> float:
    """User and system seconds of a process so far, all its threads."""
    fields = _proc(pid, "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def status(pid: int | None = None) -> dict[str, int]:
    """``VmHWM``, ``RssAnon``, ``RssShmem`` and the like, in bytes."""
    lines = (line.split() for line in _proc(pid, "status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def own_bytes(pid: int | None = None) -> int:
    """Memory of a process that no file on disk backs: not its libraries."""
    found = status(pid)
    return found.get("RssAnon", 0) + found.get("RssShmem", 0)


def family(pid: int) -> list[int]:
    """A process and shoal's workers among its children.

    Not what else it starts for an instant: DeepSpeed runs compilers to see what it could build.
    """
    return [pid, *(child for child in _children(pid) if _is_worker(child))]


def _is_worker(pid: int) -> bool:
    try:
        return b"shoal.runtime.worker" in _proc(pid, "cmdline").read_bytes()
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
    backs; shared memory is in it once, as much as the process that has most of it.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._highest: dict[int, int] = {}
        self.peak_own_bytes = 0

    def look(self) -> None:
        found = {}
        for pid in family(self._pid):
            try:
                found[pid] = status(pid)
            except OSError:
                continue  # it has ended
        for pid, fields in found.items():
            self._highest[pid] = max(self._highest.get(pid, 0), fields.get("VmHWM", 0))
        private = sum(fields.get("RssAnon", 0) for fields in found.values())
        shared = max((fields.get("RssShmem", 0) for fields in found.values()), default=0)
        self.peak_own_bytes = max(self.peak_own_bytes, private + shared)

    @property
    def peak_rss_bytes(self) -> int:
        return sum(self._highest.values())
