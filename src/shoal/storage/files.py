"""Files that survive a crash: every change that shoal's checkpoints make goes through here.

[Note: what is durable]
A file's bytes are on disk when its fsync returned; its name is there when the fsync of its
directory returned. So a thing is made under a name that no reader looks at, synced, renamed,
and then its directory is synced. Until then a reader finds the old thing, after it the new.

A failed fsync is final: the kernel has dropped the pages and forgotten the error, so a second
call that succeeds proves nothing. The file is given up and written again under a new name.

Calls are written ``os.name(...)``, so that tests/chaos/faults can count and fail each of them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from itertools import takewhile
from pathlib import Path
from types import TracebackType

from shoal.core.errors import StorageError
from shoal.storage.failures import UNSUPPORTED, reported
from shoal.storage.failures import Damaged as Damaged
from shoal.storage.failures import DiskFull as DiskFull
from shoal.storage.failures import FileError as FileError
from shoal.storage.failures import free_bytes as free_bytes

_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_MODE, _DIRECTORY_MODE = 0o600, 0o700
_ZEROS = bytes(1 << 20)
_NO_LINKS = {*UNSUPPORTED, errno.EPERM, errno.EXDEV}
_TICK_S = 0.05
_ASKING_S = 10.0


class NewFile:
    """A file that was not there: allocated whole, written once in order, synced, closed.

    Leaving the block without an error is the promise that ``size`` bytes are on disk; its
    name is not until the directory is synced. After an error the file must not be used.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self._left = size
        with reported("create", path, needed=size):
            self._descriptor = os.open(path, _NEW, _FILE_MODE)
            try:
                _allocate(self._descriptor, size)
            except BaseException:
                os.close(self._descriptor)
                raise

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``, all of it."""
        view = memoryview(data)
        assert view.nbytes <= self._left, f"{self.path} was to have {self.size} bytes"
        with reported("write", self.path, needed=self.size):
            _write_all(self._descriptor, view)
        self._left -= view.nbytes

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                assert not self._left, f"{self.path} lacks {self._left} of {self.size} bytes"
                with reported("sync", self.path, needed=self.size):
                    os.fsync(self._descriptor)
        finally:
            with suppress(OSError):  # it was synced, or it is given up
                os.close(self._descriptor)


def _allocate(descriptor: int, size: int) -> bool:
    """Have the disk promise ``size`` bytes; False where the file system cannot promise."""
    if not size or not hasattr(os, "posix_fallocate"):
        return not size
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return False
        raise
    return True


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        try:
            written = os.write(descriptor, view)
        except InterruptedError:
            continue
        if written <= 0:
            raise OSError(errno.EIO, "the disk takes no more bytes and gives no reason")
        view = view[written:]


def write_file(path: Path, data: bytes) -> None:
    """Make a new file of ``data``; its bytes are on disk when this returns."""
    with NewFile(path, len(data)) as file:
        file.write(data)


def replace_file(path: Path, data: bytes) -> None:
    """Give ``path`` the content ``data`` in one step: readers see the old or the new.

    On disk when this returns; after an error the old content is there. One writer at a time.
    """
    scratch = path.with_name(f".{path.name}.tmp")
    remove_file(scratch)
    try:
        write_file(scratch, data)
        with reported("put in place", path):
            os.rename(scratch, path)
    except BaseException:
        with suppress(StorageError):
            remove_file(scratch)
        raise
    sync_directory(path.parent)


def publish(scratch: Path, target: Path) -> None:
    """Give a finished directory its name; it survives a power failure when this returns.

    After an error ``scratch`` has its old name again, if the disk still allows that.
    """
    sync_directory(scratch)
    with reported("publish", target):
        os.rename(scratch, target)
    try:
        sync_directory(target.parent)
    except BaseException:
        with suppress(OSError):
            os.rename(target, scratch)
        raise


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` durable. Never call it again after it failed."""
    with reported("sync", path):
        descriptor = os.open(path, _DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in UNSUPPORTED:  # a file system that syncs no directories
                raise
        finally:
            os.close(descriptor)


def make_directory(path: Path, *, inside: Path | None = None) -> None:
    """Make ``path`` and what lacks above it, for this user alone; durable.

    What is there already may have been made by a process that died before it was durable,
    so the deepest of these directories is synced into its parent too. ``inside``: the
    directory above ``path`` that must be there, whenever it vanishes: it is never made.
    """
    missing = _missing(path)
    if inside is not None:
        missing = missing[: len(path.relative_to(inside).parts)]
    _sync_name(missing[-1].parent if missing else path)
    for folder in reversed(missing):
        with reported("make the directory", folder):
            try:
                os.mkdir(folder, _DIRECTORY_MODE)
            except FileExistsError:
                if not folder.is_dir():
                    raise
        sync_directory(folder.parent)


def _sync_name(directory: Path) -> None:
    try:
        sync_directory(directory.parent)
    except FileError as error:
        if error.errno not in (errno.EACCES, errno.EPERM):  # then this user did not make it
            raise


def _missing(path: Path) -> list[Path]:
    """``path`` and the directories above it, up to the first that is there."""
    with reported("look at", path):
        return list(takewhile(lambda folder: not folder.is_dir(), (path, *path.parents)))


def make_new_directory(path: Path) -> None:
    """Make ``path``, which must not be there; not durable yet."""
    with reported("make the directory", path):
        os.mkdir(path, _DIRECTORY_MODE)


def rename(source: Path, target: Path) -> None:
    """Rename within a directory; not durable yet."""
    with reported("rename", source):
        os.rename(source, target)


def link(source: Path, target: Path) -> None:
    """Give a file that never changes a second name; not durable yet.

    A file system without such names gets a copy.
    """
    with reported("link", target):
        try:
            os.link(source, target, follow_symlinks=False)
            return
        except OSError as error:
            if error.errno not in {*_NO_LINKS, errno.EMLINK}:
                raise
    with reported("copy", target, needed=source.stat().st_size):
        data = source.read_bytes()
    write_file(target, data)


class SecondName(Enum):
    """What became of a second name for a file."""

    GIVEN = "given"
    NOT_THIS = "not this"  # the file is gone, or has as many names as it may have
    NONE = "none"  # this file system has no such names


def second_name(source: Path, target: Path) -> SecondName:
    """Give a file that never changes a second name, if that can be; not durable yet."""
    with reported("link", target):
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.EMLINK, errno.ENOENT, errno.ESTALE):
                return SecondName.NOT_THIS
            if error.errno in _NO_LINKS:
                return SecondName.NONE
            raise
    return SecondName.GIVEN


def has_links(directory: Path) -> bool:
    """Whether a file in ``directory`` could have a second name; False where none can be made.

    Others may ask at the same time, of a directory of several studies: they take turns.
    """
    first, second = (directory / f".{name}.link.tmp" for name in ("first", "second"))
    with ExitStack() as asking:
        try:
            asking.enter_context(turn(directory, _ASKING_S))
            for path in (first, second):
                remove_file(path)
            write_file(first, b"")
            return second_name(first, second) is SecondName.GIVEN
        except StorageError:
            return False
        finally:
            for path in (first, second):
                with suppress(StorageError):
                    remove_file(path)


@contextmanager
def turn(directory: Path, patience_s: float) -> Iterator[None]:
    """Be the only one in here of those that come for ``directory``, each for a short while.

    Who has waited for ``patience_s`` goes on beside the others, and so does whoever is on a file
    system without locks: nothing may depend on it but bytes. A process that dies leaves.
    """
    with reported("open", directory):
        descriptor = os.open(directory, _DIRECTORY)
    try:
        until = time.monotonic() + patience_s
        while not _locked(descriptor) and time.monotonic() < until:
            time.sleep(_TICK_S)
        yield
    finally:
        with suppress(OSError):  # a process that was forked meanwhile has the descriptor too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Whether there is nothing to wait for."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def remove_file(path: Path) -> bool:
    """Remove a file or a link, if it is there; True when it was."""
    with reported("remove", path):
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
    return True


def remove_tree(parent: Path, name: str) -> None:
    """Remove what has this name in ``parent``, with all that is in it; links are not followed."""
    assert name not in ("", ".", ".."), "a name in a directory"
    assert "/" not in name, f"{name!r} is no name in a directory"
    path = parent / name
    with reported("remove", path):
        if not path.is_symlink() and path.is_dir():
            for item, is_directory in reversed(_contents(path)):
                (os.rmdir if is_directory else os.unlink)(item)
        elif os.path.lexists(path):
            os.unlink(path)


def _contents(path: Path) -> list[tuple[Path, bool]]:
    """Everything in a tree and whether it is a directory, each before what is in it."""
    found, pending = [], [path]
    while pending:
        here = pending.pop()
        found.append((here, True))
        with os.scandir(here) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(here / entry.name)
                else:
                    found.append((here / entry.name, False))
    return found


class Reserve:
    """Disk space set aside: given back when the disk is full, so that the end can be recorded.

    ``take`` may be called at any time; a file that a crash left half allocated is made again.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size

    @property
    def held(self) -> bool:
        """Whether the bytes are set aside now."""
        with suppress(OSError):
            return not self.path.is_symlink() and self.path.stat().st_size == self.size
        return False

    def take(self) -> None:
        """Set the bytes aside, unless they are.

        Raises:
            DiskFull: there is no room; nothing is set aside.
        """
        if self.held:
            return
        remove_file(self.path)
        try:
            self._fill()
        except BaseException:
            with suppress(StorageError):
                remove_file(self.path)
            raise

    def release(self) -> bool:
        """Give the bytes back; False when none were set aside."""
        return remove_file(self.path)

    def _fill(self) -> None:
        with reported("set space aside in", self.path, needed=self.size):
            descriptor = os.open(self.path, _NEW, _FILE_MODE)
            try:
                if not _allocate(descriptor, self.size):
                    for start in range(0, self.size, len(_ZEROS)):
                        _write_all(descriptor, memoryview(_ZEROS)[: self.size - start])
            finally:
                os.close(descriptor)
