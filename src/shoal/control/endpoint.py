"""Where a study's socket is, and who is at its other end.

[Note: long paths] A Unix socket's address has room for 107 bytes; a study's directory may
be longer, and may be renamed while the study runs. So the directory is opened, and the
address goes through its descriptor: ``/proc/self/fd/7/control.sock``.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

from shoal.core.errors import SpecError, StorageError
from shoal.core.studyfiles import SOCKET

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def open_directory(directory: str | os.PathLike[str]) -> int:
    """A descriptor that names the directory and can do nothing else; the caller closes it."""
    return os.open(Path(directory), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def address(descriptor: int) -> str:
    """The socket's address, through a descriptor of its directory."""
    return f"/proc/self/fd/{descriptor}/{SOCKET}"


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end, as the kernel knows it."""
    size = _CREDENTIALS.size
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(_CREDENTIALS.unpack(packed)[1])


def listen(place: int, directory: str) -> socket.socket:
    """A listening socket that only this user can open; a dead process's is replaced."""
    _remove_stale(place, directory)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)  # bind gives the file the socket's mode
        listener.bind(address(place))
        listener.listen()
    except OSError as error:
        listener.close()
        raise StorageError(
            f"cannot listen for commands on {directory}/{SOCKET}: {error.strerror or error}. "
            "Keep the study on a file system that has Unix sockets and room, such as a local disk."
        ) from error
    listener.setblocking(False)
    return listener


def _remove_stale(place: int, directory: str) -> None:
    mode = _mode(place)
    if mode is None:
        return
    if not stat.S_ISSOCK(mode):
        raise SpecError(
            f"{directory}/{SOCKET} is in the way: it is no socket, so shoal did not make it and "
            "does not remove it. Move it away, or keep the study in another directory."
        )
    os.unlink(SOCKET, dir_fd=place)


def _mode(place: int) -> int | None:
    try:
        return os.lstat(SOCKET, dir_fd=place).st_mode
    except FileNotFoundError:
        return None


def identity(place: int) -> tuple[int, int] | None:
    """Which file has the socket's name now."""
    try:
        found = os.lstat(SOCKET, dir_fd=place)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
