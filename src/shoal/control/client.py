"""The other end of the socket: one command to a study that runs, and its answer."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.control.commands import Command, command_to_json
from shoal.control.endpoint import address, open_directory
from shoal.core.errors import SpecError, StorageError
from shoal.core.studyfiles import RECORD, SOCKET, TRIALS, describe_lost_record
from shoal.observe import is_running, jsonl

_MAX_ANSWER_BYTES = 16 * 2**20
_CHUNK_BYTES = 2**16
_BETWEEN_S, _PAUSE_S = 10.0, 0.02
"""How long a study that is held may have no socket: while it is opened, and while it ends."""


class NotRunning(SpecError):
    """No process runs this study now."""


class NotYet(SpecError):
    """No study is in this directory."""


def send(
    directory: str | os.PathLike[str], command: Command, *, timeout_s: float = 60.0
) -> dict[str, Any]:
    """Send one command to the study of ``directory`` and return its answer.

    Raises:
        NotRunning: no process listens there.
        SpecError: no study is there, it is another user's, it refused (the text is its
            reason), or no answer came within ``timeout_s``.
        StorageError: what a study there was asked for is lost.
    """
    place = Path(directory)
    line = command_to_json(command)
    until = time.monotonic() + timeout_s
    with _connect(place, timeout_s) as connection:
        try:
            with contextlib.suppress(ConnectionError):  # refused unread: the reason is there
                connection.sendall(line.encode() + b"\n")
            received = _receive(connection, until)
        except TimeoutError:
            raise SpecError(
                f"the study in {place} did not answer {type(command).__name__} within "
                f"{timeout_s:g} s. It may be busy and still do it: see shoal show {place}."
            ) from None
    return _read_answer(place, received)


def _why_not(place: Path) -> str:
    return "it is no directory" if place.exists() else "there is no such directory"


def _connect(place: Path, timeout_s: float) -> socket.socket:
    """A connection. A study that begins or ends has no socket and is held all the same: wait."""
    until = time.monotonic() + min(timeout_s, _BETWEEN_S)
    while True:
        is_held = is_running(place)  # first: what ends meanwhile is not running
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            with _opened(place) as descriptor:  # each time: another study may have its place
                _reach(connection, descriptor, place)
            return connection
        except BaseException as error:
            connection.close()
            if not is_held or not isinstance(error, NotRunning | NotYet | StorageError):
                raise
        if time.monotonic() >= until:
            raise SpecError(
                f"the study in {place} begins or ends just now, and takes no commands. Ask again."
            )
        time.sleep(_PAUSE_S)


@contextlib.contextmanager
def _opened(place: Path) -> Iterator[int]:
    try:
        descriptor = open_directory(place)
    except (FileNotFoundError, NotADirectoryError):
        raise SpecError(f"there is no study in {place}: {_why_not(place)}.") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _reach(connection: socket.socket, descriptor: int, place: Path) -> None:
    try:
        connection.connect(address(descriptor))
    except (FileNotFoundError, ConnectionRefusedError):
        if not (place / RECORD).is_file() and (place / TRIALS).is_dir():
            raise StorageError(describe_lost_record(place)) from None
        if not (place / RECORD).is_file():
            raise NotYet(
                f"there is no study in {place}: it has no {RECORD}. Give the directory of a "
                "study, such as runs/NAME."
            ) from None
        raise NotRunning(
            f"the study in {place} is not running. Go on with it: shoal resume {place}."
        ) from None
    except BlockingIOError:
        raise SpecError(
            f"the study in {place} is busy: too many commands wait for it. Try again later."
        ) from None
    except PermissionError:
        raise SpecError(
            f"{place / SOCKET} belongs to another user (uid {_owner(place)}), and takes commands "
            "from that user only. Run the command as the user who runs the study."
        ) from None


def _owner(place: Path) -> int | str:
    try:
        return os.lstat(place / SOCKET).st_uid
    except OSError:
        return "unknown"


def _receive(connection: socket.socket, until: float) -> bytes:
    """One line; without its newline where the connection ended before."""
    received = bytearray()
    while len(received) <= _MAX_ANSWER_BYTES and not received.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        try:
            data = connection.recv(_CHUNK_BYTES)
        except ConnectionError:
            break
        if not data:
            break
        received += data
    return bytes(received)


def _read_answer(place: Path, received: bytes) -> dict[str, Any]:
    if not received.endswith(b"\n"):
        raise SpecError(
            f"the study in {place} ended before it answered. See how: shoal show {place}; go on "
            f"with it: shoal resume {place}."
        )
    try:
        answer = jsonl.loads(received.decode())
    except ValueError as error:
        raise SpecError(f"the study in {place} gave an answer that is no JSON: {error}.") from None
    if not isinstance(answer, dict):
        raise SpecError(f"the study in {place} gave an answer that is no JSON object.")
    if "error" in answer:
        raise SpecError(str(answer["error"]))
    return answer
