"""What SQLite and the file system raise, as a StorageError that says what to do."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from shoal.core.errors import StorageError
from shoal.core.units import format_bytes

Doing = Literal["read", "write"]
INTACT = "The checkpoints under trials/ are files of their own, and are as they were."
_BATCH = {
    "read": "Nothing was changed.",
    "write": "Nothing of this batch was written; all before it is intact.",
}


@contextmanager
def in_words(path: Path, doing: Doing) -> Iterator[None]:
    """Turn what goes wrong with ``path`` inside into a StorageError."""
    try:
        yield
    except sqlite3.Error as error:
        raise StorageError(_describe(error, path, doing)) from error
    except UnicodeDecodeError as error:  # a name in SQLite's own message was damaged
        raise StorageError(damaged(path, "it holds names that are no text")) from error
    except OSError as error:
        reason, place = error.strerror or str(error), error.filename or path
        raise StorageError(_describe_failure(place, path, doing, reason, reason)) from error


def damaged(path: Path, reason: str) -> str:
    """What is said of a database with broken pages."""
    return (
        f"{path} is damaged: {reason}. Nothing was changed. {INTACT} Put a copy of the file back, "
        f"or save what can be read of it: sqlite3 {path} .recover"
    )


def _describe(error: sqlite3.Error, path: Path, doing: Doing) -> str:
    name = str(getattr(error, "sqlite_errorname", type(error).__name__))
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or "decode to UTF-8" in str(error):
        return damaged(path, str(error))
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return (
            f"cannot {doing} {path}: another program keeps it locked. {_BATCH[doing]} Close what "
            "has it open (a database browser, a backup), then run the same command again."
        )
    return _describe_failure(path, path, doing, f"{error} ({name})", name)


def _describe_failure(place: Path | str, path: Path, doing: Doing, reason: str, hint: str) -> str:
    return (
        f"cannot {doing} {place}: {reason}; {_free(path)}. {_BATCH[doing]} {_remedy(hint)} then "
        "the same command goes on."
    )


def _remedy(hint: str) -> str:
    if "FULL" in hint or "space" in hint or "quota" in hint:
        return "Make room on that disk;"
    if "READONLY" in hint or "CANTOPEN" in hint or "PERM" in hint or "ermission" in hint:
        return "Let this user read and write in that directory;"
    return "Look at that disk (dmesg);"


def _free(path: Path) -> str:
    try:
        return f"{format_bytes(shutil.disk_usage(path.parent).free)} are free there"
    except OSError:
        return "how much is free is unknown"
