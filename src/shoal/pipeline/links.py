"""What the stages of one trial send each other, over a socket to each of the others.

[Note: frames]
A message is a header, its form if that is another than the last one's of its kind, and one frame
with its tensors (``packing``). A thread for each peer writes, one reads; so a SEND never waits,
and what has come waits in memory until its RECV. That is bounded by the program: a stage runs no
further ahead than its schedule lets it, and then waits for an answer.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shoal.core.errors import WorkerError
from shoal.pipeline.packing import Packer

_HEADER = struct.Struct("!BQQ")  # kind, bytes of the form (0: as before), bytes of the frame
Kind = int


class Links:
    """The ends that one stage has. Used by one thread.

    Args:
        sockets: One to each other stage; owned from now on.
        packer: Of the stage's parameters, which go by name.
        notify: Called from other threads when something came.
        device: Where what came is put.
        name: What errors call a peer.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        packer: Packer,
        notify: Callable[[], None],
        device: torch.device,
        name: Callable[[int], str] = "stage {}".format,
    ) -> None:
        self._packer, self._device, self._name = packer, device, name
        self._ends = {peer: _End(peer, sock, notify) for peer, sock in sockets.items()}

    def know(self, packer: Packer) -> None:
        """Parameters are of another module from now on."""
        self._packer = packer

    def send(self, peer: int, kind: Kind, tree: Any) -> None:
        """Hand a structure of tensors over; they may be changed as soon as this returns."""
        packed = self._packer.pack(tree)
        # Until a thread has written it, it is memory of the host's: no device's units are counted
        # for how long that takes.
        with _disable_current_modes():
            frame = torch.empty(packed.num_bytes, dtype=torch.uint8)
            packed.write(frame, 0)
        self._ends[peer].put(kind, packed.form, frame)

    def has(self, peer: int, kind: Kind) -> bool:
        """Whether a message of this kind is here.

        Raises:
            WorkerError: it could not be read.
        """
        end = self._ends[peer]
        if end.error is not None:
            raise WorkerError(f"what {self._name(peer)} sent could not be read: {end.error}")
        return bool(end.came[kind])

    def gone(self, peer: int) -> bool:
        """Whether nothing more comes; what came before is there."""
        return self._ends[peer].is_over

    def take(self, peer: int, kind: Kind) -> Any:
        """The next structure of this kind, which is here."""
        form, frame = self._ends[peer].came[kind].popleft()
        here = frame.to(self._device, copy=True)  # on a virtual device too, where that counts it
        return self._packer.unpack(form, here, 0)

    def close(self) -> None:
        """Send what was handed over, then close; what comes is not read any more."""
        for end in self._ends.values():
            end.close()

    def cut(self) -> None:
        """Close at once: the others see that this stage is gone."""
        for end in self._ends.values():
            end.cut()


class _End:
    """One socket, with its threads."""

    def __init__(self, peer: int, sock: socket.socket, notify: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.is_over = False
        self.came: Mapping[Kind, deque[tuple[bytes, Tensor]]] = _Queues()
        self._socket, self._notify = sock, notify
        self._forms: dict[Kind, bytes] = {}
        self._frames: queue.SimpleQueue[tuple[bytes, bytes, Tensor] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"to-{peer}", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name=f"from-{peer}", daemon=True).start()

    def put(self, kind: Kind, form: bytes, frame: Tensor) -> None:
        told, self._forms[kind] = self._forms.get(kind), form
        new = b"" if told == form else form
        self._frames.put((_HEADER.pack(kind, len(new), frame.numel()), new, frame))

    def close(self) -> None:
        self._frames.put(None)
        self._writer.join()
        self.cut()

    def cut(self) -> None:
        self._frames.put(None)  # the writer fails at what it has to send, and ends
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reader sees the end
            while (message := self._frames.get()) is not None:
                header, form, frame = message
                self._socket.sendall(header + form)
                if frame.numel():
                    self._socket.sendall(memoryview(frame.numpy().data))

    def _read(self) -> None:
        forms: dict[Kind, bytes] = {}
        try:
            while True:
                kind, form_bytes, size = _HEADER.unpack(self._filled(bytearray(_HEADER.size)))
                if form_bytes:
                    forms[kind] = bytes(self._filled(bytearray(form_bytes)))
                frame = torch.empty(size, dtype=torch.uint8)
                self._filled(frame.numpy())
                self.came[kind].append((forms[kind], frame))
                self._notify()
        except (EOFError, OSError):
            self.is_over = True  # the study sees who is gone
            self._notify()
        except BaseException as error:  # there is no memory for a frame, say
            self.error = error
            self._notify()

    def _filled(self, buffer: Any) -> Any:
        left = memoryview(buffer)
        while left:
            count = self._socket.recv_into(left)
            if not count:
                raise EOFError
            left = left[count:]
        return buffer


class _Queues(dict[Kind, deque[tuple[bytes, Tensor]]]):
    """What came, by kind; the reading thread appends, the stage's takes."""

    def __missing__(self, kind: Kind) -> deque[tuple[bytes, Tensor]]:
        return self.setdefault(kind, deque())
