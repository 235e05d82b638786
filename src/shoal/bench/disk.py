"""The disk: large blocks past the page cache, written and read by a few threads.

The file has no name from the moment it is open, so nothing is left of it however
the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shoal.bench.measured import Disk, Rate
from shoal.bench.timing import repeat
from shoal.core.seams import Clock

BLOCK_BYTES = 4 << 20
_THREADS = 4
_PASSES = 4  # of which the file holds the bytes
_FIRST_BYTES, _LAST_BYTES = 256 << 10, 16 << 20  # that a glance writes at a time
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)

Move = Callable[[int, mmap.mmap, int], object]
"""Writes or reads one block: descriptor, buffer, offset."""


@dataclass(frozen=True, slots=True)
class _File:
    descriptor: int
    direct: bool


def measure_disk(directory: Path, pass_bytes: int, budget_s: float, clock: Clock) -> Disk:
    """Write and read ``pass_bytes`` at a time in ``directory``.

    A pass of writing ends when its bytes are on the disk (``fdatasync``).

    Raises:
        OSError: the directory cannot be written, or has no room for the file.
    """
    blocks = max(1, pass_bytes // BLOCK_BYTES)
    with _unnamed_file(directory) as file:
        # Reserved first: a full disk is known before anything is written.
        os.posix_fallocate(file.descriptor, 0, _PASSES * blocks * BLOCK_BYTES)
        passes = _Passes(file, blocks, clock)
        with passes:
            write = repeat(passes.write, budget_s / 2, clock)
            read = repeat(passes.read, budget_s / 2, clock)
    amount = blocks * BLOCK_BYTES
    return Disk(
        write=Rate.of(amount, write),
        read=Rate.of(amount, read),
        direct=file.direct,
        file_system=file_system(directory),
    )


def glance(directory: Path, budget_s: float, clock: Clock) -> float | None:
    """Bytes per second at which a file would be saved here, by a quick look.

    As a generation is written: through the page cache by one thread, and synced. Pieces of
    a quarter of a MiB to 16 MiB, each four times the one before, as long as the next fits in
    ``budget_s``; what a sync takes by itself is taken off, but for a quarter. None where
    nothing can be written.
    """
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            return _glance(file.fileno(), budget_s, clock)
    except OSError:
        return None


def _glance(descriptor: int, budget_s: float, clock: Clock) -> float:
    data = memoryview(os.urandom(_FIRST_BYTES))

    def seconds(num_bytes: int) -> float:
        begin, left = clock.now(), num_bytes
        while left > 0:
            left -= os.write(descriptor, data[:left])
        os.fdatasync(descriptor)
        return max(clock.now() - begin, 1e-6)

    until = clock.now() + budget_s
    sync_s, best, size = seconds(1), 0.0, _FIRST_BYTES
    while True:
        taken_s = seconds(size)
        moving_s = max(taken_s - sync_s, taken_s / 4)
        best = max(best, size / moving_s)
        size *= 4
        next_s = taken_s + 3 * moving_s
        if size > _LAST_BYTES or clock.now() + next_s > until:
            return best


@contextlib.contextmanager
def _unnamed_file(directory: Path) -> Iterator[_File]:
    """A file without a name, past the page cache where the file system can do that."""
    descriptor, name = tempfile.mkstemp(prefix=".shoal-bench-", dir=directory)
    try:
        direct = _try_direct(name)
    finally:
        os.unlink(name)
    file = _File(descriptor if direct is None else direct, direct is not None)
    try:
        yield file
    finally:
        os.close(descriptor)
        if direct is not None:
            os.close(direct)


def _try_direct(name: str) -> int | None:
    """A descriptor that passes the page cache by; None where that is not possible."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC | flag)
    except OSError as error:
        if error.errno in _NO_DIRECT:
            return None
        raise
    try:  # some file systems open it and then refuse to use it
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.pwrite(descriptor, page, 0)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _NO_DIRECT:
            return None
        raise
    return descriptor


class _Passes:
    """Threads with a buffer each, that go through the file again and again."""

    def __init__(self, file: _File, blocks: int, clock: Clock) -> None:
        self._file, self._blocks, self._clock = file, blocks, clock
        self._buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(_THREADS)]
        for buffer in self._buffers:
            buffer.write(os.urandom(BLOCK_BYTES))  # no disk can make them smaller
        self._executor = ThreadPoolExecutor(_THREADS, "shoal-bench-disk")
        self._over = threading.Event()
        self._next = {"write": 0, "read": 0}

    def __enter__(self) -> _Passes:
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads, at their next block; then give the buffers back."""
        self._over.set()
        self._executor.shutdown()
        for buffer in self._buffers:
            buffer.close()

    def write(self) -> float:
        """Seconds of one pass, its sync included."""

        def write_block(descriptor: int, buffer: mmap.mmap, offset: int) -> None:
            if os.pwrite(descriptor, buffer, offset) != BLOCK_BYTES:
                raise OSError(errno.ENOSPC, "the disk took a part of a block")

        begin = self._clock.now()
        self._run("write", write_block)
        os.fdatasync(self._file.descriptor)
        return self._clock.now() - begin

    def read(self) -> float:
        """Seconds of one pass."""
        if not self._file.direct:  # what was written is in the cache
            os.posix_fadvise(self._file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        begin = self._clock.now()
        self._run("read", lambda descriptor, buffer, at: os.preadv(descriptor, [buffer], at))
        return self._clock.now() - begin

    def _run(self, kind: str, move: Move) -> None:
        """One pass: a block in turn to each thread."""
        first = self._next[kind] % _PASSES * self._blocks
        self._next[kind] += 1

        def work(thread: int) -> None:
            for block in range(first + thread, first + self._blocks, _THREADS):
                if self._over.is_set():
                    return
                move(self._file.descriptor, self._buffers[thread], block * BLOCK_BYTES)

        for future in [self._executor.submit(work, thread) for thread in range(_THREADS)]:
            future.result()


def file_system(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The kind of file system that ``directory`` is on; empty where that is not known."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    place = str(directory.resolve())
    best, kind = "", ""
    for line in lines:
        _, point, found, *_ = line.split(" ")
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind
