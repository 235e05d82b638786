"""Connections to a study's database: as careful as they can be, and errors in words.

[Note: who may checkpoint]
While a study runs its database has a WAL, so that readers and the writer do not wait for
each other. SQLite before 3.51.3 can lose pages when two connections checkpoint a WAL at
the same time, so only the one writer does. A reader opens the file read only: to
checkpoint, or to remove the WAL as the last one that closes, takes an exclusive lock
that no read-only file gets.

    running      study.db  study.db-wal  study.db-shm
    killed       the same: a reader recovers the WAL's index and changes neither file
    closed       study.db alone, with no WAL: it can be copied, and read from a disc

[Note: no ordinary open]
POSIX locks belong to a process and a file: were this process to open and close study.db
by itself while it also writes it, SQLite's locks would be gone. Only SQLite opens it;
``_copied`` is the exception, and asks first whether anybody runs the study.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import tempfile
from contextlib import closing
from pathlib import Path

from shoal.core.errors import StorageError
from shoal.core.studyfiles import DATABASE
from shoal.observe.lock import is_running
from shoal.observe.schema import check_format, migrate, newest_format
from shoal.observe.trouble import INTACT, damaged, in_words

EARLIER = "events.jsonl"  # what development versions wrote
_WAIT_S = 30.0  # for a lock of another program; readers hold one for milliseconds
_LONGEST = 1 << 28  # bytes of one value
_CAREFUL = ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0")
_SUFFIXES = ("", "-wal", "-shm", "-journal")


def database_path(place: str | os.PathLike[str]) -> Path:
    """The database of a study's directory; a path that is no directory is taken as it is."""
    path = Path(place)
    return path if path.name == DATABASE else path / DATABASE


def open_for_writing(path: Path) -> sqlite3.Connection:
    """The writer's connection, of today's format and whole; made where there was none.

    The caller holds the study's lock.

    Raises:
        StorageError: the file is not a study's, of a newer format, or damaged.
    """
    _refuse_earlier(path)
    is_checked = _is_whole(path)
    with in_words(path, "write"):
        _make_private(path)
        connection = _connect(path, "mode=rwc")
        try:
            version = check_format(connection, path)
            if not is_checked:
                _check_pages(connection, path)
            connection.execute("PRAGMA journal_mode = WAL")
            migrate(connection, version)
        except BaseException:
            connection.close()
            raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that changes no file; where no study has written yet, to an empty one.

    Text comes as bytes. Any thread may use it, one at a time.

    Raises:
        StorageError: as ``open_for_writing``.
    """
    _refuse_earlier(path)
    with in_words(path, "read"):
        connection = _open_untouched(path) if path.exists() else _memory()
        try:
            version = check_format(connection, path)
            if version < newest_format():
                connection = _in_memory(connection)
                # its writer may have begun since the first look
                migrate(connection, check_format(connection, path))
        except BaseException:
            connection.close()
            raise
    connection.text_factory = bytes
    return connection


def _connect(path: Path, how: str) -> sqlite3.Connection:
    _refuse_links(path)
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        timeout=_WAIT_S,
        isolation_level=None,
        check_same_thread="mode=rw" in how,
    )
    try:
        _harden(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _make_private(path: Path) -> None:
    """An empty file that others cannot read, for SQLite to fill; the WAL gets its rights."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _refuse_links(path: Path) -> None:
    """SQLite follows links: those of a directory from somebody else could lead anywhere."""
    for suffix in _SUFFIXES:
        file = Path(f"{path}{suffix}")
        if not _is_plain_or_absent(file):
            raise StorageError(
                f"{file} is no plain file, and a study's database is one in its directory. "
                "Nothing was opened. Put the file itself there."
            )


def _is_plain_or_absent(file: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(file).st_mode)
    except FileNotFoundError:  # a WAL goes when its writer closes
        return True


def _harden(connection: sqlite3.Connection) -> None:
    configure = getattr(connection, "setconfig", None)  # Python 3.12
    if configure is not None:
        configure(getattr(sqlite3, "SQLITE_DBCONFIG_DEFENSIVE"), True)  # noqa: B009  # as above
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    for pragma in _CAREFUL:
        connection.execute(f"PRAGMA {pragma}")


def _is_whole(path: Path) -> bool:
    """Refuse what is not ours before a connection that could write is made.

    False if only a writer can tell: there is a journal to roll back first.
    """
    if not path.exists():
        return True
    with in_words(path, "read"):
        try:
            connection = _read_only(path, "mode=ro")
        except sqlite3.OperationalError as error:
            if _lacks_rights(error):
                return False
            raise
        with closing(connection):
            check_format(connection, path)
            _check_pages(connection, path)
    return True


def _check_pages(connection: sqlite3.Connection, path: Path) -> None:
    found = [row[0] for row in connection.execute("PRAGMA quick_check(3)")]
    if found != ["ok"]:
        raise StorageError(damaged(path, "; ".join(map(str, found))))


def _open_untouched(path: Path) -> sqlite3.Connection:
    """Read only; where the directory cannot have the WAL's index, without or from a copy."""
    try:
        return _read_only(path, "mode=ro")
    except sqlite3.OperationalError as error:
        if not _lacks_rights(error) or is_running(path.parent):
            raise
    if any(_size(Path(f"{path}{suffix}")) for suffix in ("-wal", "-journal")):
        return _copied(path)
    return _read_only(path, "mode=ro&immutable=1")


def _read_only(path: Path, how: str) -> sqlite3.Connection:
    connection = _connect(path, how)
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # opens the WAL
    except BaseException:
        connection.close()
        raise
    return connection


def _lacks_rights(error: sqlite3.OperationalError) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)


def _copied(path: Path) -> sqlite3.Connection:
    """A database in memory, of files beside which nothing can be written."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as place:
        for suffix in ("", "-wal", "-journal"):
            if _size(Path(f"{path}{suffix}")):
                shutil.copyfile(f"{path}{suffix}", Path(place) / f"{DATABASE}{suffix}")
        return _in_memory(_connect(Path(place) / DATABASE, "mode=rw"))


def _in_memory(connection: sqlite3.Connection) -> sqlite3.Connection:
    """A copy of a database in memory; ``connection`` is closed."""
    memory = _memory()
    with closing(connection):
        connection.backup(memory)
    return memory


def _memory() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _harden(connection)
    return connection


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _refuse_earlier(path: Path) -> None:
    if (path.parent / EARLIER).exists() and not path.exists():
        raise StorageError(
            f"{path.parent} was written by an earlier development version of shoal: its events "
            f"are in {EARLIER}, which this version does not read. {INTACT} Use the version that "
            "wrote it, or give this study another name."
        )
