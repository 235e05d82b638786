"""Files as they lie there: regular files only, no links, never more bytes than expected."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType

from shoal.storage.failures import damaged, reported

_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block


class OpenFile:
    """A regular file, open for reading at any offset; its size is that of the opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reported("open", path):
            self._descriptor = os.open(path, _OLD)
        try:
            found = os.fstat(self._descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise damaged(path, "it is no regular file")
            self.size = found.st_size
        except BaseException:
            self.close()
            raise

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view``, bytes in a row, from ``offset`` on.

        Raises:
            Damaged: the file ends before ``view`` is full.
        """
        while view:
            with reported("read", self.path):
                count = os.preadv(self._descriptor, [view], offset)
            if not count:
                raise damaged(self.path, f"it ends at byte {offset}, {len(view)} bytes early")
            view, offset = view[count:], offset + count

    def close(self) -> None:
        """Close it; a second time does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_file(path: Path, limit: int) -> bytes:
    """The whole of a file of at most ``limit`` bytes; a longer one is refused unread."""
    with OpenFile(path) as file:
        if file.size > limit:
            raise damaged(path, f"it has {file.size} bytes, at most {limit} are expected")
        data = bytearray(file.size)
        file.read_into(memoryview(data), 0)
    return bytes(data)


def size_of(path: Path) -> int:
    """The size of a regular file, without opening it."""
    with reported("look at", path):
        found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise damaged(path, "it is no regular file")
    return found.st_size
