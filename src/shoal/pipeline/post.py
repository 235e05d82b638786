"""Messages between the processes of a pipeline, over torch.distributed.

[Note: the post]
Every kind of message from one device to another has a line of its own, with a thread at both
ends: a SEND puts a frame in its thread's queue and never waits; the receiving thread is always
one frame ahead, so that it is here when the RECV comes. A frame has the size of the one before
it; where that changes, a notice and the new form go first:

    | notice: new form, new size | form | frame | frame | frame | ...

A line holds LOOKAHEAD frames that nobody asked for yet. All others are held by who uses them,
from RECV to B: as many as micro-batches are in flight, not as many as a step has.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.core.errors import WorkerError
from shoal.pipeline.packing import Packer
from shoal.program.ir import Action, Op
from shoal.program.needs import message_kind

LOOKAHEAD = 2
_HEADER = 64
_NOTICE = 1


class Line(NamedTuple):
    """One kind of message between this device and a peer."""

    op: Op
    peer: int
    kind: int


def lines_of(actions: Iterable[Action]) -> Mapping[Line, int]:
    """The lines a device's list uses, and how many messages go over each."""
    messages = (action for action in actions if action.op in (Op.SEND, Op.RECV))
    return Counter(line_of(action) for action in messages)


def line_of(action: Action) -> Line:
    """The line of a SEND or RECV."""
    assert action.peer is not None
    return Line(action.op, action.peer, message_kind(action))


class Post:
    """The lines of one device; use as a context manager.

    ``close`` waits until all that was sent has left.
    """

    def __init__(self, lines: Mapping[Line, int], packer: Packer) -> None:
        self._packer = packer
        self._out = {line: _Outgoing(line) for line in lines if line.op is Op.SEND}
        self._in = {line: _Incoming(line, n) for line, n in lines.items() if line.op is Op.RECV}

    def __enter__(self) -> Post:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

    def send(self, line: Line, tree: Any) -> None:
        """Hand a structure of tensors over; they may be changed as soon as this returns."""
        self._out[line].put(self._packer, tree)

    def receive(self, line: Line) -> Any:
        """The next structure of a line; waits for it."""
        form, frame = self._in[line].get()
        return self._packer.unpack(form, frame, _HEADER)

    def close(self) -> None:
        for outgoing in self._out.values():
            outgoing.close()


class _Outgoing:
    """The sending end. Its queue is as long as the program lets it be."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._form, self._size = b"", _HEADER
        self._frames: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        name = f"to-{line.peer}-{line.kind}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, packer: Packer, tree: Any) -> None:
        self._raise()
        packed = packer.pack(tree)
        if packed.form != self._form:
            self._form, size = packed.form, _HEADER + packed.num_bytes
            notice = torch.zeros(self._size, dtype=torch.uint8)
            header = torch.tensor([_NOTICE, len(packed.form), size], dtype=torch.int64)
            notice[:24] = header.view(torch.uint8)
            self._frames.put(notice)
            self._frames.put(torch.frombuffer(bytearray(packed.form), dtype=torch.uint8))
            self._size = size
        frame = torch.empty(self._size, dtype=torch.uint8)
        frame[:_HEADER] = 0
        packed.write(frame, _HEADER)
        self._frames.put(frame)

    def close(self) -> None:
        self._frames.put(None)
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise _lost(self._line, self._error)

    def _run(self) -> None:
        try:
            while (frame := self._frames.get()) is not None:
                dist.send(frame, dst=self._line.peer, tag=self._line.kind)
        except BaseException as error:
            self._error = error


class _Incoming:
    """The receiving end, ahead of who asks by no more than LOOKAHEAD frames."""

    def __init__(self, line: Line, count: int) -> None:
        self._line, self._count = line, count
        self._ready: queue.Queue[tuple[bytes, Tensor] | BaseException] = queue.Queue(LOOKAHEAD)
        name = f"from-{line.peer}-{line.kind}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def get(self) -> tuple[bytes, Tensor]:
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise _lost(self._line, found)
        return found

    def _run(self) -> None:
        try:
            form, size = b"", _HEADER
            for _ in range(self._count):
                frame = self._next(size)
                flag, form_bytes, new_size = frame[:24].view(torch.int64).tolist()
                if flag == _NOTICE:
                    form, size = self._next(form_bytes).numpy().tobytes(), new_size
                    frame = self._next(size)
                self._ready.put((form, frame))
        except BaseException as error:
            self._ready.put(error)

    def _next(self, size: int) -> Tensor:
        frame = torch.empty(size, dtype=torch.uint8)
        dist.recv(frame, src=self._line.peer, tag=self._line.kind)
        return frame


def _lost(line: Line, error: BaseException) -> WorkerError:
    return WorkerError(
        f"the connection to stage {line.peer} is lost: {type(error).__name__}: {error}. Look at "
        "what that stage says."
    )
