"""The lock of a study's directory: at most one process runs a study at a time.

It is the kernel's (``flock``), so a process that dies lets go of it, however it dies.
What stands in the file is for people; nothing depends on it but a number in a message.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from pathlib import Path
from types import TracebackType

from shoal.core.errors import SpecError, StorageError
from shoal.core.studyfiles import LOCK

_ATTEMPTS, _PAUSE_S = 25, 0.02  # ``is_running`` holds it for an instant, shared
_SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # no link, no wait for a pipe


class StudyLock:
    """Holds a study's directory for this process; a context manager.

    Raises:
        SpecError: another process holds it, or this one does already.
        StorageError: the file cannot be made.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / LOCK
        self._descriptor: int | None = _acquire(self.path)
        _sign(self._descriptor)

    @property
    def is_in_place(self) -> bool:
        """Whether its file still is the one in the directory: that may have been moved away."""
        return self._descriptor is not None and _is_at(self._descriptor, self.path)

    def close(self) -> None:
        """Let go of it; the file stays. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> StudyLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def is_running(directory: str | os.PathLike[str]) -> bool:
    """Whether some process, this one included, holds the lock of a study's directory."""
    try:
        descriptor = os.open(Path(directory) / LOCK, os.O_RDONLY | _SAFELY)
    except OSError:  # never run, or nothing that a study has written
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _acquire(path: Path) -> int:
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_S)
        descriptor = _open(path)
        if _try_lock(descriptor, fcntl.LOCK_EX) and _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)
    raise SpecError(
        f"{path.parent} has another writer: is this study running already{_holder(path)}? Wait "
        "for it or stop it, or give this study another name."
    )


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
    except OSError as error:
        raise StorageError(
            f"cannot make the lock {path}: {error.strerror}. It has to be a plain file in a "
            "directory that can be written to."
        ) from error


def _try_lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the locked file is the one at ``path`` still: a directory may be replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _sign(descriptor: int) -> None:
    words = f"process {os.getpid()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.write(descriptor, words.encode())


def _holder(path: Path) -> str:
    """Who says to hold it, for a message."""
    try:
        with open(os.open(path, os.O_RDONLY | _SAFELY), "rb") as file:
            found = re.match(rb"process (\d{1,10}) ", file.read(64))
    except OSError:
        return ""
    return f" (process {found[1].decode()})" if found else ""
