"""The ``os`` that ``shoal.storage.files`` sees while a test makes its disk fail.

Counts the calls that change a disk, does harm at the n-th, and keeps a record of all of
them, from which faults/power.py makes what a power failure could leave.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from shoal.storage import files


class Fault(Enum):
    """What may happen at a call; values are those of faults/preload.c."""

    KILL = 1  # before the call
    KILL_AFTER = 2  # the call is done, nothing after it
    TORN = 3  # half of a write is done, then the process dies
    EIO = 4
    DEAD = 5  # EIO, from this call on
    ENOSPC = 6
    FULL = 7  # ENOSPC, from this call on, for whatever needs space
    SHORT = 8  # a write takes half, and says so
    EINTR = 9  # a signal comes before a write
    LOST = 10  # a sync fails, and what was to be synced is gone

    def fits(self, call: str, *, is_last: bool) -> bool:
        """Whether this can happen to that call, and is not the same as at another one."""
        if self in (Fault.TORN, Fault.SHORT, Fault.EINTR):
            return call == "write"
        if self is Fault.KILL_AFTER:  # as before the next call, unless that is never made
            return is_last or call in ("rename", "fsync")
        return call == "fsync" or self is not Fault.LOST


NEEDS_SPACE = {"open", "mkdir", "posix_fallocate", "write", "fsync", "rename", "link"}
KILLS = {Fault.KILL, Fault.KILL_AFTER, Fault.TORN}


class Killed(BaseException):
    """Ends a process that is only played: no call of it reaches the disk any more."""


def kill_process() -> None:
    """The real thing."""
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyOs:
    """``os``, whose ``point``-th changing call meets ``fault``; syncs are not really done.

    Those of directories outside ``root`` do not count.
    """

    def __init__(
        self,
        root: Path,
        point: int = 0,
        fault: Fault | None = None,
        *,
        kill: Callable[[], None] = kill_process,
    ) -> None:
        self.root, self.point, self.fault, self._kill = root, point, fault, kill
        self.calls: list[str] = []  # the name of each changing call
        self.trace: list[tuple[Any, ...]] = []  # what each call that succeeded did
        self._paths: dict[int, str] = {}
        self._offsets: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def say(self, what: str) -> None:
        """Note in the trace what was promised to the outside at this moment."""
        self.trace.append(("say", what))

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            descriptor = os.open(path, flags, mode)
        else:
            descriptor = self._call(
                "open", lambda: os.open(path, flags, mode), ("create", str(path))
            )
        self._paths[descriptor], self._offsets[descriptor] = str(path), 0
        return descriptor

    def posix_fallocate(self, descriptor: int, offset: int, size: int) -> None:
        record = ("allocate", self._paths[descriptor], size)
        self._call("posix_fallocate", lambda: os.posix_fallocate(descriptor, offset, size), record)

    def write(self, descriptor: int, data: memoryview) -> int:
        def part(size: int) -> int:
            done = os.write(descriptor, data[:size])
            self.trace.append(("write", path, self._offsets[descriptor], bytes(data[:done])))
            self._offsets[descriptor] += done
            return done

        path = self._paths[descriptor]
        fault = self._met("write")
        if fault in (Fault.TORN, Fault.SHORT):
            done = part(len(data) // 2 or 1)
            if fault is Fault.TORN:
                self._kill()
            return done
        return self._call("write", lambda: part(len(data)), None, fault, counted=True)

    def fsync(self, descriptor: int) -> None:
        def lose() -> None:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                size = os.fstat(descriptor).st_size
                os.ftruncate(descriptor, 0)
                os.ftruncate(descriptor, size)

        if not Path(self._paths[descriptor]).is_relative_to(self.root):
            return
        fault = self._met("fsync")
        if fault is Fault.LOST:
            lose()
        record = ("sync", self._paths[descriptor], _who_syncs())
        self._call("fsync", lambda: None, record, fault, counted=True)

    def rename(self, source: Any, target: Any) -> None:
        record = ("rename", str(source), str(target))
        self._call("rename", lambda: os.rename(source, target), record)

    def link(self, source: Any, target: Any, *, follow_symlinks: bool) -> None:
        record = ("link", str(source), str(target))
        self._call(
            "link", lambda: os.link(source, target, follow_symlinks=follow_symlinks), record
        )

    def unlink(self, path: Any) -> None:
        self._call("unlink", lambda: os.unlink(path), ("unlink", str(path)))

    def rmdir(self, path: Any) -> None:
        self._call("rmdir", lambda: os.rmdir(path), ("unlink", str(path)))

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        self._call("mkdir", lambda: os.mkdir(path, mode), ("mkdir", str(path)))

    def _met(self, call: str) -> Fault | None:
        """Count a call; the fault that it meets."""
        self.calls.append(call)
        number = len(self.calls)
        if number == self.point:
            return self.fault
        if number > self.point > 0 and self.fault is Fault.DEAD:
            return Fault.DEAD
        if number > self.point > 0 and self.fault is Fault.FULL and call in NEEDS_SPACE:
            return Fault.FULL
        return None

    def _call(
        self,
        name: str,
        do: Callable[[], Any],
        record: tuple[Any, ...] | None,
        fault: Fault | None = None,
        *,
        counted: bool = False,
    ) -> Any:
        fault = fault if counted else self._met(name)
        if fault is Fault.KILL:
            self._kill()
        if fault in (Fault.EIO, Fault.DEAD, Fault.LOST):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault in (Fault.ENOSPC, Fault.FULL):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault is Fault.EINTR:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        try:
            result = do()
            if record is not None:
                self.trace.append(record)
        finally:
            if fault is Fault.KILL_AFTER:
                self._kill()
        return result


class Played(FaultyOs):
    """A process that dies without dying: from the kill on, every call raises ``Killed``."""

    def __init__(self, root: Path, point: int = 0, fault: Fault | None = None) -> None:
        super().__init__(root, point, fault, kill=self._die)
        self._dead = False

    def _die(self) -> None:
        self._dead = True
        raise Killed

    def _met(self, call: str) -> Fault | None:
        if self._dead:
            raise Killed
        return super()._met(call)


def _who_syncs() -> str:
    """The function of shoal.storage on whose behalf a sync happens."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_name in ("fsync", "sync_directory"):
        frame = frame.f_back
    return frame.f_code.co_qualname


@contextmanager
def installed(faulty: FaultyOs) -> Iterator[FaultyOs]:
    """``shoal.storage.files`` sees ``faulty`` for ``os`` inside."""
    real, files.os = files.os, faulty
    try:
        yield faulty
    finally:
        files.os = real


def memory() -> str | None:
    """Where a file costs no disk; these tests make and remove many thousands."""
    place = "/dev/shm"
    return place if os.access(place, os.W_OK | os.X_OK) else None


def listing(root: Path) -> list[str]:
    """Everything under ``root``, as sorted relative paths."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))
