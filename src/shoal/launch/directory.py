"""A study's directory: made, taken up again, replaced, or refused because it is another's."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

from shoal.core.errors import SpecError, StorageError
from shoal.observe.db import Database
from shoal.observe.lock import LOCK, StudyLock
from shoal.resume import StudyRecord, record_from_json, record_to_json
from shoal.storage.files import make_directory, replace_file

RECORD = "study.json"
_ANEW = {LOCK, "reserve", "control.sock", "timeline.jsonl", "study.db", "study.db-wal"} | {
    "study.db-shm",
    f".{RECORD}.tmp",
}
"""What a process that died before it wrote the record may have left."""


class StudyDirectory:
    """A directory that this process holds; a context manager.

    Attributes:
        recorded: What was asked for when it ran before; None for a new study.
        database: Open for writing.

    Raises:
        SpecError: it is not empty and holds no study, or another process runs it.
        StorageError: it cannot be read or written.
    """

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self.path, self._replaced = path, path.with_name(f".{path.name}.replaced")
        self._stack = ExitStack()
        self._is_settled = False
        _refuse_strangers(path)
        make_directory(path)
        if overwrite and (path / RECORD).exists():
            self._set_aside()
        self._lock = self._stack.enter_context(StudyLock(path))
        try:
            self.recorded = read_record(path)
            self.database = self._stack.enter_context(Database(path, lock=self._lock))
        except BaseException:
            self._stack.close()
            raise

    def _set_aside(self) -> None:
        """What an earlier run left waits until the new plan stands."""
        shutil.rmtree(self._replaced, ignore_errors=True)
        with StudyLock(self.path):  # refuses while another process runs it
            self.path.rename(self._replaced)
        make_directory(self.path)

    def settle(self, record: StudyRecord) -> None:
        """The plan stands: this is the study's record, and what it replaces can go."""
        replace_file(self.path / RECORD, record_to_json(record).encode())
        self.recorded = record
        self._is_settled = True
        shutil.rmtree(self._replaced, ignore_errors=True)

    def close(self) -> None:
        """Let go; a new study that never stood leaves no trace, and what was there is back."""
        self._stack.close()
        if not self._is_settled and self.recorded is None:
            shutil.rmtree(self.path, ignore_errors=True)
            if self._replaced.exists():
                self._replaced.rename(self.path)

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
    return record_from_json(text)


def _refuse_strangers(path: Path) -> None:
    """shoal deletes and adds to nothing that it did not write."""
    if not path.exists():
        return
    if not path.is_dir():
        raise SpecError(f"{path} is no directory. Choose another name or directory.")
    names = {entry.name for entry in path.iterdir()}
    if RECORD not in names and names - _ANEW:
        raise SpecError(
            f"{path} is not empty and holds no study. Choose another name or directory; shoal "
            "deletes nothing that it did not write."
        )
