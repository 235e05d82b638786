"""The study's end of the socket: one thread that reads commands and sends answers.

A connection is one command and one answer:

    connect -> READING --line--> WAITING --answer()--> SENDING -> closed
                  |  too long, too late, no command        ^
                  +--------------- {"error": ...} ---------+

Nobody waits for a slow client: all connections are served by one poll, reading and
sending have a deadline, and there is room for so many connections and no more.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import TracebackType
from typing import Any

from shoal.control.commands import MAX_LINE_BYTES, Command, command_from_json
from shoal.control.endpoint import identity, listen, open_directory, peer_uid
from shoal.core.errors import ShoalError
from shoal.core.studyfiles import SOCKET
from shoal.observe import jsonl

Answer = Callable[[Mapping[str, Any]], None]
Deliver = Callable[[Command, Answer], None]
_DEAF_S = 1.0  # no more is accepted for so long after the process ran out of descriptors
_LAST_WORDS_S = 1.0
_ENDED = "the study's process ended before it answered; see how it ended: shoal show."


class _Phase(Enum):
    READING = auto()
    WAITING = auto()
    SENDING = auto()


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    deadline: float
    phase: _Phase = _Phase.READING
    received: bytearray = field(default_factory=bytearray)
    to_send: bytes = b""


class ControlServer:
    """Listens in a study's directory from the start until ``close``; a context manager.

    ``deliver(command, answer)`` is called on the server's thread and must not wait;
    ``answer(mapping)`` may be called later from any thread, once: what comes second is
    dropped, and so is an answer to a client that has left. A ``ShoalError`` that
    ``deliver`` raises is the answer. One process at a time serves a directory: the
    caller holds the study's lock, so a socket that is there already is a dead one's.

    Raises:
        SpecError: something that is no socket has the socket's name.
        StorageError: the file system has no room or no sockets.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        deliver: Deliver,
        *,
        timeout_s: float = 10.0,
        connections: int = 32,
    ) -> None:
        self._deliver, self._timeout_s, self._room = deliver, timeout_s, connections
        self._connections: dict[int, _Connection] = {}
        self._answers: deque[tuple[_Connection, bytes]] = deque()
        self._lock = threading.Lock()
        self._is_closing = self._is_closed = False
        self._deaf_until: float | None = None
        self._place = open_directory(directory)
        try:
            self._listener = listen(self._place, str(directory))
        except BaseException:
            os.close(self._place)
            raise
        self._identity = identity(self._place)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._poll.register(self._bell, select.POLLIN)
        self._thread = threading.Thread(target=self._serve, name="shoal-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the answers that are there, refuse the rest, remove the socket. Again: nothing."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            os.eventfd_write(self._bell, 1)
        self._thread.join()
        with self._lock:
            self._is_closed = True
            os.close(self._bell)
        if self._identity is not None and identity(self._place) == self._identity:
            os.unlink(SOCKET, dir_fd=self._place)
        os.close(self._place)

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- the thread -------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                for descriptor, happened in self._poll.poll(self._patience_ms()):
                    if descriptor == self._listener.fileno():
                        self._accept()
                    elif descriptor == self._bell:
                        os.eventfd_read(self._bell)
                    elif descriptor in self._connections:
                        self._move(self._connections[descriptor], happened)
                self._take_answers()
                self._drop_late()
        finally:
            self._finish()

    def _patience_ms(self) -> float | None:
        """Until the next deadline; for ever when there is none."""
        deadlines = [c.deadline for c in self._connections.values() if c.phase != _Phase.WAITING]
        if self._deaf_until is not None:
            deadlines.append(self._deaf_until)
        left = min(deadlines, default=None)
        return None if left is None else max(0.0, left - time.monotonic()) * 1e3

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # out of descriptors, or a client that left at once
            self._poll.modify(self._listener, 0)
            self._deaf_until = time.monotonic() + _DEAF_S
            return
        accepted.setblocking(False)
        if peer_uid(accepted) != os.getuid():
            accepted.close()
        elif len(self._connections) >= self._room:
            with accepted, contextlib.suppress(OSError):
                accepted.send(_error(f"{self._room} commands wait already; try again later."))
        else:
            deadline = time.monotonic() + self._timeout_s
            self._connections[accepted.fileno()] = _Connection(accepted, deadline)
            self._poll.register(accepted, select.POLLIN)

    def _move(self, connection: _Connection, happened: int) -> None:
        """One step of a connection, as far as it goes without waiting."""
        try:
            if connection.phase is _Phase.READING:
                self._read(connection)
            elif connection.phase is _Phase.SENDING and happened & select.POLLOUT:
                self._send_some(connection)
            else:  # while it waits only a hang-up is reported
                self._drop(connection)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)

    def _read(self, connection: _Connection) -> None:
        room = MAX_LINE_BYTES + 1 - len(connection.received)
        data = connection.socket.recv(room)
        connection.received += data
        line, newline, rest = connection.received.partition(b"\n")
        if len(connection.received) > MAX_LINE_BYTES:
            self._refuse(connection, f"a command has at most {MAX_LINE_BYTES} bytes.")
        elif rest:
            self._refuse(connection, "a connection is for one command, on one line.")
        elif newline:
            self._hand_over(connection, bytes(line))
        elif not data:
            self._refuse(connection, "a command ends with a newline, and there was none.")

    def _hand_over(self, connection: _Connection, line: bytes) -> None:
        connection.phase = _Phase.WAITING
        self._poll.modify(connection.socket, 0)
        try:
            command = command_from_json(line.decode())
            self._deliver(command, self._answer_for(connection))
        except UnicodeDecodeError as error:
            self._refuse(connection, f"a command is UTF-8: {error}.")
        except ShoalError as error:
            self._refuse(connection, str(error))
        except Exception as error:  # the study goes on, whatever a command runs into
            self._refuse(connection, f"{type(error).__name__}: {error}")

    def _answer_for(self, connection: _Connection) -> Answer:
        def answer(reply: Mapping[str, Any]) -> None:
            line = jsonl.dumps(dict(reply)).encode() + b"\n"
            with self._lock:
                if not self._is_closed:
                    self._answers.append((connection, line))
                    os.eventfd_write(self._bell, 1)

        return answer

    def _take_answers(self) -> None:
        while self._answers:
            connection, line = self._answers.popleft()
            is_here = connection in self._connections.values()
            if is_here and connection.phase is _Phase.WAITING:
                self._start_sending(connection, line)

    def _refuse(self, connection: _Connection, reason: str) -> None:
        self._start_sending(connection, _error(reason))

    def _start_sending(self, connection: _Connection, line: bytes) -> None:
        connection.phase, connection.to_send = _Phase.SENDING, line
        connection.deadline = time.monotonic() + self._timeout_s
        self._poll.modify(connection.socket, select.POLLOUT)

    def _send_some(self, connection: _Connection) -> None:
        sent = connection.socket.send(connection.to_send)
        connection.to_send = connection.to_send[sent:]
        if not connection.to_send:
            self._drop(connection)

    def _drop_late(self) -> None:
        now = time.monotonic()
        if self._deaf_until is not None and now >= self._deaf_until:
            self._deaf_until = None
            self._poll.modify(self._listener, select.POLLIN)
        for connection in list(self._connections.values()):
            if connection.phase is _Phase.READING and now >= connection.deadline:
                self._refuse(connection, f"no command came within {self._timeout_s:g} s.")
            elif connection.phase is _Phase.SENDING and now >= connection.deadline:
                self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection.socket.fileno())
        self._poll.unregister(connection.socket)
        connection.socket.close()

    def _finish(self) -> None:
        """The last words of every connection, for as long as a second each."""
        self._listener.close()
        self._take_answers()
        for connection in list(self._connections.values()):
            if connection.phase is not _Phase.SENDING:
                self._refuse(connection, _ENDED)
            connection.socket.settimeout(_LAST_WORDS_S)
            with contextlib.suppress(OSError):
                connection.socket.sendall(connection.to_send)
            self._drop(connection)


def _error(reason: str) -> bytes:
    return jsonl.dumps({"error": reason}).encode() + b"\n"
