"""Messages and descriptors over a socket pair between two of shoal's own processes."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from typing import Any

_MOST_SENT = 253  # that Linux sends at a time
_HEADER = struct.Struct("!QI")  # bytes of the message, descriptors beside it


class Channel:
    """One end: ``send`` from any thread, ``receive`` from one.

    Messages are pickled; both ends are processes of one study, and nothing is ever read
    from a file or a network.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message; descriptors are duplicated into the other process.

        Raises:
            OSError: the other end is gone.
        """
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        header = _HEADER.pack(len(body), len(descriptors))
        with self._lock:
            if descriptors:
                socket.send_fds(self._socket, [header], list(descriptors))
            else:
                self._socket.sendall(header)
            self._socket.sendall(body)

    def receive(self) -> tuple[Any, tuple[int, ...]]:
        """The next message and its descriptors; blocks.

        Raises:
            EOFError: the other end is gone.
        """
        header, descriptors = self._read_header()
        size, count = _HEADER.unpack(header)
        assert count == len(descriptors)
        return pickle.loads(self._read(size)), tuple(descriptors)

    def shut(self) -> None:
        """Have ``receive`` end when it has read all that came; from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end; the other one's ``receive`` raises EOFError."""
        self._socket.close()

    def _read_header(self) -> tuple[bytes, list[int]]:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _HEADER.size, _MOST_SENT)
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("the other process closed its end")
        return data + self._read(_HEADER.size - len(data)), descriptors

    def _read(self, size: int) -> bytes:
        parts = bytearray(size)
        filled = memoryview(parts)
        while filled:
            try:
                count = self._socket.recv_into(filled)
            except OSError as error:
                raise EOFError(str(error)) from error
            if not count:
                raise EOFError("the other process closed its end in the middle of a message")
            filled = filled[count:]
        return bytes(parts)
