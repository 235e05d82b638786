"""What the stages of one trial send each other, over a socket to each of the others.

[Note: frames]
A message is a header, its form if that is another than the last one's of its kind, and one frame
with its tensors (``packing``). A thread for each peer writes, one reads; so a SEND never waits,
and what has come waits in memory until its RECV. That is bounded by the program: a stage runs no
further ahead than its schedule lets it, and then waits for an answer.

Large frames lie in memory that both processes share (``shared``); then the header says where. What
ends say each other about that memory has kinds of its own.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shoal.core.errors import WorkerError
from shoal.pipeline.packing import Packer
from shoal.pipeline.shared import (
    LEAST_BYTES,
    Slot,
    Slots,
    can_share,
    close_descriptor,
    is_trial,
    mapped,
    write_trial,
)

_HEADER = struct.Struct("!BQQq")
"""Kind, bytes of the form (0: as before), bytes of the frame, its slot (-1: it follows)."""
_DROP, _SEEN, _TRIAL, _DONE = range(252, 256)  # about a slot: no kinds of messages
Kind = int


class Links:
    """The ends that one stage has. Used by one thread.

    Args:
        sockets: One to each other stage; owned from now on.
        packer: Of the stage's parameters, which go by name.
        notify: Called from other threads when something came.
        device: Where what came is put.
        name: What errors call a peer.
        shares: Whether large frames may go through shared memory.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        packer: Packer,
        notify: Callable[[], None],
        device: torch.device,
        name: Callable[[int], str] = "stage {}".format,
        *,
        shares: bool = True,
    ) -> None:
        self._packer, self._device, self._name = packer, device, name
        self._ends = {
            peer: _End(peer, sock, notify, shares and can_share(sock))
            for peer, sock in sockets.items()
        }

    def know(self, packer: Packer) -> None:
        """Parameters are of another module from now on."""
        self._packer = packer

    def send(self, peer: int, kind: Kind, tree: Any, *, widely: bool = False) -> None:
        """Hand a structure of tensors over; they may be changed as soon as this returns.

        Those of a model may lie ``widely`` where they arrive: there is as much room for them as
        where they are made. A batch's may not: it may be a window of all the data that there is.
        """
        packed, end = self._packer.pack(tree, widely=widely), self._ends[peer]
        # Until it is read, it is memory of the host's: no device's units are counted for how long
        # that takes.
        with _disable_current_modes():
            where = end.slot(packed.num_bytes) or torch.empty(packed.num_bytes, dtype=torch.uint8)
            packed.write(where.memory if isinstance(where, Slot) else where, 0)
        end.put(kind, packed.form, packed.num_bytes, where)

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
        end = self._ends[peer]
        form, frame, slot = end.came[kind].popleft()
        here = frame.to(self._device, copy=True)  # on a virtual device too, where that counts it
        if (
            slot >= 0
        ):  # it was copied when that returned: it is no memory that a device reads later
            end.say(_DONE, slot)
        return self._packer.unpack(form, here, 0)

    def close(self) -> None:
        """Send what was handed over, then close; what comes is not read any more."""
        for end in self._ends.values():
            end.close()

    def cut(self) -> None:
        """Close at once: the others see that this stage is gone."""
        for end in self._ends.values():
            end.cut()


class _Came(NamedTuple):
    form: bytes
    frame: Tensor
    slot: int


class _Message(NamedTuple):
    """What a writer writes; a frame after it, unless that is in a slot."""

    words: bytes
    frame: Tensor | None = None
    slot: Slot | None = None  # whose descriptor the receiver lacks


class _End:
    """One socket, with its threads."""

    def __init__(
        self, peer: int, sock: socket.socket, notify: Callable[[], None], shares: bool
    ) -> None:
        self.error: BaseException | None = None
        self.is_over = False
        self.came: Mapping[Kind, deque[_Came]] = _Queues()
        self.shares = False  # the peer has seen what lies in a slot
        self._may_ask = shares
        self._slots, self._windows = Slots(), dict[int, Tensor]()
        self._peer, self._socket, self._notify = peer, sock, notify
        self._forms: dict[Kind, bytes] = {}
        self._messages: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"to-{peer}", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name=f"from-{peer}", daemon=True).start()

    def slot(self, num_bytes: int) -> Slot | None:
        """Where a frame may lie; None where it goes over the socket."""
        if num_bytes < LEAST_BYTES or not (self.shares or self._may_ask):
            return None
        slot, given_up = self._slots.take(num_bytes)
        for number in given_up:
            self.say(_DROP, number)
        if slot is not None and self._may_ask:
            self._may_ask = False
            write_trial(slot)
            words = _HEADER.pack(_TRIAL, 0, num_bytes, slot.number)
            self._messages.put(_Message(words, None, slot))
            return None
        return slot

    def put(self, kind: Kind, form: bytes, num_bytes: int, where: Slot | Tensor) -> None:
        told, self._forms[kind] = self._forms.get(kind), form
        new = b"" if told == form else form
        if isinstance(where, Slot):
            words = _HEADER.pack(kind, len(new), num_bytes, where.number) + new
            self._messages.put(_Message(words, None, where))
        else:
            words = _HEADER.pack(kind, len(new), num_bytes, -1) + new
            self._messages.put(_Message(words, where))

    def say(self, kind: Kind, slot: int, answer: int = 0) -> None:
        """A word about a slot."""
        self._messages.put(_Message(_HEADER.pack(kind, 0, answer, slot)))

    def close(self) -> None:
        self._messages.put(None)
        self._writer.join()
        self.cut()

    def cut(self) -> None:
        self._messages.put(None)  # the writer fails at what it has to send, and ends
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._writer.join()
        self._socket.close()
        self._slots.close()

    # -- the writing thread -----------------------------------------------------------------

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reader sees the end
            while (message := self._messages.get()) is not None:
                self._write_words(message)
                if message.frame is not None and message.frame.numel():
                    self._socket.sendall(memoryview(message.frame.numpy().data))

    def _write_words(self, message: _Message) -> None:
        sent, slot = 0, message.slot
        if slot is not None and slot.descriptor >= 0:
            sent = socket.send_fds(self._socket, [message.words], [slot.descriptor])
            close_descriptor(slot)
        self._socket.sendall(message.words[sent:])

    # -- the reading thread -----------------------------------------------------------------

    def _read(self) -> None:
        forms: dict[Kind, bytes] = {}
        try:
            while True:
                words, descriptor = self._header()
                kind, form_bytes, size, slot = _HEADER.unpack(words)
                if kind >= _DROP:
                    self._hear(kind, size, slot, descriptor)
                    continue
                if form_bytes:
                    with _closing_if_lost(descriptor):
                        forms[kind] = bytes(self._filled(bytearray(form_bytes)))
                frame = self._frame(size, slot, descriptor)
                self.came[kind].append(_Came(forms[kind], frame, slot))
                self._notify()
        except (EOFError, OSError):
            self.is_over = True  # the study sees who is gone
            self._notify()
        except BaseException as error:  # there is no memory for a frame, say
            self.error = error
            self._notify()

    def _frame(self, size: int, slot: int, descriptor: int) -> Tensor:
        if slot >= 0:
            if descriptor >= 0:
                self._windows[slot] = self._mapped(size, descriptor)
            if slot not in self._windows:
                raise WorkerError(
                    f"no descriptor came with a frame of {size} bytes in shared memory: this "
                    "process may have too many open files (ulimit -n)"
                )
            return self._windows[slot][:size]
        frame = torch.empty(size, dtype=torch.uint8)
        self._filled(frame.numpy())
        return frame

    def _mapped(self, size: int, descriptor: int) -> Tensor:
        try:
            return _window(descriptor)
        except OSError as error:  # it is not the socket that has ended
            words = f"the shared memory of a frame of {size} bytes cannot be mapped: {error}"
            raise WorkerError(words) from error

    def _hear(self, kind: Kind, size: int, slot: int, descriptor: int) -> None:
        """What the peer says about a slot: of this end's, or of its own."""
        if kind == _DONE:
            self._slots.free(slot)
        elif kind == _DROP:
            self._windows.pop(slot, None)
        elif kind == _TRIAL:
            self.say(_SEEN, slot, answer=self._sees(slot, descriptor))
        elif size:
            self.shares = True
            self._slots.free(slot)
        else:
            self._slots.close()
            warnings.warn(
                f"member {self._peer} of a gang cannot read memory that it is to share: large "
                "frames to it go over the socket.",
                stacklevel=2,
            )

    def _sees(self, slot: int, descriptor: int) -> bool:
        try:
            self._windows[slot] = _window(descriptor)
        except (OSError, ValueError):
            return False
        return is_trial(self._windows[slot])

    def _header(self) -> tuple[bytes, int]:
        """The next header, and the descriptor that came with it; -1: none."""
        words, descriptor = b"", -1
        while len(words) < _HEADER.size:
            with _closing_if_lost(descriptor):
                more, found, _, _ = socket.recv_fds(self._socket, _HEADER.size - len(words), 1)
                if not more:
                    raise EOFError
            words += more
            descriptor = found[0] if found else descriptor
        return words, descriptor

    def _filled(self, buffer: Any) -> Any:
        left = memoryview(buffer)
        while left:
            count = self._socket.recv_into(left)
            if not count:
                raise EOFError
            left = left[count:]
        return buffer


@contextlib.contextmanager
def _closing_if_lost(descriptor: int) -> Iterator[None]:
    """A descriptor that came before the peer was lost stays with nobody."""
    try:
        yield
    except BaseException:
        if descriptor >= 0:
            os.close(descriptor)
        raise


def _window(descriptor: int) -> Tensor:
    """A peer's slot; the descriptor is closed."""
    try:
        return mapped(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


class _Queues(dict[Kind, deque[_Came]]):
    """What came, by kind; the reading thread appends, the stage's takes."""

    def __missing__(self, kind: Kind) -> deque[_Came]:
        return self.setdefault(kind, deque())
