"""What the operating system refuses, as errors that say what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.core.errors import StorageError
from shoal.core.units import Bytes, format_bytes

UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_BAD_CONTENT = {
    errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENXIO, errno.ENODATA,
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ESTALE,
}  # fmt: skip
_ADVICE = {
    errno.EIO: "The disk may be failing: see the kernel's log, and move the study to another.",
    errno.EROFS: "The file system is read-only: see the kernel's log, or choose another.",
    errno.EACCES: "Make the study's directory your own and writable.",
    errno.EPERM: "Make the study's directory your own and writable.",
    errno.EMFILE: "Raise the limit of open files: ulimit -n.",
    errno.ENFILE: "Raise the system's limit of open files: sysctl fs.file-max.",
    errno.ENOENT: "Restore it from a copy, or remove what refers to it.",
    errno.ELOOP: "Replace the symbolic link by what it points to.",
    errno.EFBIG: "Raise the limit of file sizes: ulimit -f.",
}
_NO_PLACE = {
    errno.ENOENT: "No directory can be made there: choose another place.",
    errno.EEXIST: "A file of that name is there: move it away, or choose another place.",
}
"""Where a directory was to be made."""


class FileError(StorageError):
    """The operating system refused a call; ``errno`` says how, None that it has no number."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno

    @property
    def is_damage(self) -> bool:
        """Whether the file is bad or gone, and not this process short of something."""
        return self.errno in _BAD_CONTENT


class DiskFull(FileError):
    """There is no room, or no quota."""


class Damaged(StorageError):
    """What lies on the disk is not what shoal wrote."""


def damaged(path: Path, reason: str) -> Damaged:
    """The error of a file whose content is wrong."""
    return Damaged(f"{path} is damaged or not shoal's: {reason}. Restore it from a copy.")


@contextmanager
def reported(action: str, path: Path, *, needed: int = 0) -> Iterator[None]:
    """Every OSError inside becomes a FileError that says what was done to which file."""
    try:
        yield
    except OSError as error:
        raise _translated(action, path, error, needed) from error


def _translated(action: str, path: Path, error: OSError, needed: int) -> FileError:
    number = error.errno
    name = errno.errorcode.get(number, "") if number else ""
    found = f"cannot {action} {path}: {error.strerror or error}" + (f" ({name})" if name else "")
    if number in _FULL:
        free = _free_or_none(path)
        numbers = f"{format_bytes(needed)} are needed, " if needed else ""
        numbers += "free space is unknown" if free is None else f"{format_bytes(free)} are free"
        advice = "Free space there, or move the study; what was complete is unchanged."
        return DiskFull(f"{found}; {numbers}. {advice}", number)
    known = _ADVICE | _NO_PLACE if action.startswith("make") else _ADVICE
    advice = known.get(number or 0, "Check the disk, the path and its permissions.")
    return FileError(f"{found}. {advice}", number)


def free_bytes(path: Path) -> Bytes:
    """What this user may still write on the file system of ``path``."""
    with reported("ask for the free space of", path):
        found = os.statvfs(path)
    return Bytes(found.f_bavail * found.f_frsize)


def _free_or_none(path: Path) -> Bytes | None:
    for place in path.parents:
        with suppress(StorageError):
            return free_bytes(place)
    return None
