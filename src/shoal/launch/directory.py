"""A study's directory: made, taken up again, replaced, or refused because it is another's."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

from shoal.core.errors import SpecError, StorageError
from shoal.core.studyfiles import (
    DATABASE,
    LOCK,
    RECORD,
    RESERVE,
    SOCKET,
    TIMELINE,
    TRIALS,
    describe_lost_record,
)
from shoal.observe.db import Database
from shoal.observe.lock import StudyLock
from shoal.resume import StudyRecord, record_from_json, record_to_json
from shoal.storage.files import make_directory, remove_file, replace_file

_ANEW = {LOCK, RESERVE, SOCKET, TIMELINE, f".{RECORD}.tmp"} | {
    DATABASE + suffix for suffix in ("", "-wal", "-shm")
}
"""What a process that died before it wrote the record may have left."""


class StudyDirectory:
    """A directory that this process holds; a context manager.

    Attributes:
        recorded: What was asked for when it ran before; None for a new study.
        database: Open for writing.

    Raises:
        SpecError: it is not empty and holds no study, or another process runs it.
        StorageError: it cannot be read or written, or has all of a study but its record.
    """

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self.path, self._replaced = path, path.with_name(f".{path.name}.replaced")
        self._is_settled = False
        if not overwrite:
            self._put_back()
        _refuse_strangers(path)
        _refuse_links(path)
        make_directory(path)
        if overwrite and (path / RECORD).exists():
            self._set_aside()
        with ExitStack() as stack:
            self._lock = stack.enter_context(StudyLock(path))
            self.recorded = read_record(path)
            stack.callback(self._forget)
            self.database = stack.enter_context(Database(path, lock=self._lock))
            self._sweep()
            self._stack = stack.pop_all()

    def _set_aside(self) -> None:
        """What an earlier run left waits until the new plan stands."""
        shutil.rmtree(self._replaced, ignore_errors=True)
        with StudyLock(self.path):  # refuses while another process runs it
            self.path.rename(self._replaced)
        make_directory(self.path)

    def _put_back(self) -> None:
        """A process that was to replace the study died before its own plan stood."""
        if not self._replaced.exists() or (self.path / RECORD).exists():
            return
        _refuse_strangers(self.path)
        if self.path.exists():
            with StudyLock(self.path):
                shutil.rmtree(self.path)
        self._replaced.rename(self.path)

    def _forget(self) -> None:
        """A new study that never stood leaves no trace, and what was there is back."""
        if self._is_settled and self._lock.is_in_place:
            self.drop_replaced()
        is_new = not self._is_settled and self.recorded is None
        if is_new and self._lock.is_in_place:  # what is there now may be another's
            shutil.rmtree(self.path, ignore_errors=True)
            if self._replaced.exists():
                self._replaced.rename(self.path)

    def _sweep(self) -> None:
        """Remove what a process that was killed had for itself."""
        remove_file(self.path / RESERVE)
        if (self.path / SOCKET).is_socket():
            remove_file(self.path / SOCKET)
        if self.recorded is not None:  # it had just replaced an earlier study
            shutil.rmtree(self._replaced, ignore_errors=True)

    def settle(self, record: StudyRecord) -> None:
        """The plan stands: this is the study's record; what it replaces may be dropped.

        Raises:
            StorageError: as ``check``.
        """
        self.check()
        replace_file(self.path / RECORD, record_to_json(record).encode())
        self.recorded = record
        self._is_settled = True

    def drop_replaced(self) -> None:
        """What an earlier study of this name left goes, now that this one is on record."""
        shutil.rmtree(self._replaced, ignore_errors=True)

    def check(self) -> None:
        """Raise when the directory was moved or removed while the study runs.

        Raises:
            StorageError: what is written now would be found by nobody.
        """
        if not self._lock.is_in_place:
            raise StorageError(
                f"{self.path} is not the directory any more that this study began in: it was "
                "moved, removed or replaced while the study ran. What was saved is wherever it "
                "is now; put it back, and the same command goes on from there."
            )

    def close(self) -> None:
        """Let go; a new study that never stood leaves no trace, and what was there is back."""
        self._stack.close()

    def __enter__(self) -> StudyDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_record(path: Path) -> StudyRecord | None:
    """What a study was asked for; None where no process has written it yet.

    Raises:
        SpecError, StorageError: it is not a study's, damaged, or of a newer format.
    """
    try:
        text = (path / RECORD).read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(
            f"{path / RECORD} cannot be read: {error}. The study's database and checkpoints are "
            "files of their own, and nothing was changed."
        ) from error
    return record_from_json(text, str(path / RECORD))


def holds_no_record(path: Path) -> bool:
    """Whether all that is there is what a process left that died before it wrote the record."""
    names = {entry.name for entry in path.iterdir()}
    return bool(names) and names <= _ANEW


def _refuse_links(path: Path) -> None:
    """What a study writes stays inside its directory, whoever made it.

    Raises:
        StorageError: a directory of trials is a link.
    """
    trials = path / TRIALS
    inside = trials.iterdir() if trials.is_dir() and not trials.is_symlink() else ()
    for place in (trials, *inside):
        if place.is_symlink():
            raise StorageError(
                f"{place} is a symbolic link, and a study writes nothing outside its directory. "
                "Move what it points to into its place, or link the whole study's directory."
            )


def _refuse_strangers(path: Path) -> None:
    """shoal deletes and adds to nothing that it did not write."""
    if not path.exists():
        return
    if not path.is_dir():
        raise SpecError(f"{path} is no directory. Choose another name or directory.")
    names = {entry.name for entry in path.iterdir()}
    if RECORD not in names and {DATABASE, TRIALS} <= names:
        raise StorageError(describe_lost_record(path))
    if RECORD not in names and names - _ANEW:
        raise SpecError(
            f"{path} is not empty and holds no study. Choose another name or directory; shoal "
            "deletes nothing that it did not write."
        )
