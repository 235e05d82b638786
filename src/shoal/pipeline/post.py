"""Messages between the processes of a pipeline, over torch.distributed.

[Note: the post]
Every kind of message from one device to another has a line of its own, with a thread at both
ends: a SEND puts a frame in its thread's queue and never waits; the receiving thread is always
one frame ahead, so that it is here when the RECV comes. A frame has the size of the one before
it; where that changes, a notice and the new form go first:

    | notice: new form, new size | form | frame | frame | frame | ...

A line holds LOOKAHEAD frames that nobody asked for yet. All others are held by who uses them,
from RECV to B: as many as micro-batches are in flight, not as many as a step has.

These frames are host memory, and go over gloo. Where a device's memory can go to another's by
itself (``direct``), what lies on the device is in a second frame, and the first is its notice.
What goes wrong on one line is told at all of them: what waits for a peer may wait on another one.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.core.errors import WorkerError
from shoal.pipeline.direct import Direct, Loaded
from shoal.pipeline.packing import Packer, apart_bytes
from shoal.program.ir import Action, Op
from shoal.program.needs import message_kind

LOOKAHEAD = 2
_HEADER = 64
_NOTICE = 1
_LOOK_S = 0.2
_CPU = torch.device("cpu")


class Line(NamedTuple):
    """One kind of message between this device and a peer."""

    op: Op
    peer: int
    kind: int


@dataclass(frozen=True, slots=True)
class Routes:
    """How frames reach the other ranks.

    ``host`` is a group of gloo's, None for the default one. What came is put on ``device``.
    ``direct`` carries what lies there; None where that goes through host memory too.
    """

    host: dist.ProcessGroup | None = None
    device: torch.device = _CPU
    direct: Direct | None = None


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

    def __init__(
        self, lines: Mapping[Line, int], packer: Packer, routes: Routes | None = None
    ) -> None:
        self._packer, self._routes = packer, routes or Routes()
        ends = (self._routes, _Trouble(self._routes.direct))
        self._out = {line: _Outgoing(line, *ends) for line in lines if line.op is Op.SEND}
        self._in = {
            line: _Incoming(line, n, *ends) for line, n in lines.items() if line.op is Op.RECV
        }

    def __enter__(self) -> Post:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

    def send(self, line: Line, tree: Any) -> None:
        """Hand a structure of tensors over; they may be changed as soon as this returns.

        On a device: by what its stream runs from now on.
        """
        self._out[line].put(self._packer, tree)

    def receive(self, line: Line) -> Any:
        """The next structure of a line; waits for it."""
        form, frame, apart = self._in[line].get()
        if apart is None:
            frame = frame.to(self._routes.device)
        else:
            assert self._routes.direct is not None
            self._routes.direct.hand_over(apart)
        return self._packer.unpack(form, frame, _HEADER, apart)

    def close(self) -> None:
        for outgoing in self._out.values():
            outgoing.close()


class _Trouble:
    """The first thing that went wrong on any line of a post."""

    def __init__(self, direct: Direct | None) -> None:
        self._direct = direct
        self._error: WorkerError | None = None

    def note(self, line: Line, error: BaseException) -> None:
        if self._error is None:
            self._error = _lost(line, error)
        if self._direct is not None:
            self._direct.give_up()

    def look(self) -> None:
        if self._error is not None:
            raise self._error


class _Parcel(NamedTuple):
    frame: Tensor
    loaded: Loaded | None = None  # what lies on the device, unless that is in the frame


class _Outgoing:
    """The sending end. Its queue is as long as the program lets it be."""

    def __init__(self, line: Line, routes: Routes, trouble: _Trouble) -> None:
        self._line, self._routes, self._trouble = line, routes, trouble
        self._form, self._size = b"", _HEADER
        self._parcels: queue.SimpleQueue[_Parcel | None] = queue.SimpleQueue()
        name = f"to-{line.peer}-{line.kind}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, packer: Packer, tree: Any) -> None:
        self._trouble.look()
        direct = self._routes.direct
        packed = packer.pack(tree, None if direct is None else direct.device)
        if packed.form != self._form:
            self._form, size = packed.form, _HEADER + packed.num_bytes
            notice = torch.zeros(self._size, dtype=torch.uint8)
            header = torch.tensor([_NOTICE, len(packed.form), size], dtype=torch.int64)
            notice[:24] = header.view(torch.uint8)
            self._parcels.put(_Parcel(notice))
            form = torch.frombuffer(bytearray(packed.form), dtype=torch.uint8)
            self._parcels.put(_Parcel(form))
            self._size = size
        frame = torch.empty(self._size, dtype=torch.uint8)
        frame[:_HEADER] = 0
        packed.write(frame, _HEADER)
        loaded = None
        if direct is not None and packed.apart.num_bytes:
            loaded = direct.load(packed.apart)
        self._parcels.put(_Parcel(frame, loaded))

    def close(self) -> None:
        self._parcels.put(None)
        while self._thread.is_alive():
            self._trouble.look()
            self._thread.join(_LOOK_S)
        self._trouble.look()

    def _run(self) -> None:
        try:
            while (parcel := self._parcels.get()) is not None:
                self._send(parcel)
        except BaseException as error:
            self._trouble.note(self._line, error)

    def _send(self, parcel: _Parcel) -> None:
        _, peer, kind = self._line
        if parcel.loaded is not None:  # whoever is told of it may have it at once
            parcel.loaded.wait()
        dist.send(parcel.frame, dst=peer, tag=kind, group=self._routes.host)
        if parcel.loaded is not None:
            assert self._routes.direct is not None
            self._routes.direct.send(parcel.loaded.frame, peer, kind)


class _Incoming:
    """The receiving end, ahead of who asks by no more than LOOKAHEAD frames."""

    def __init__(self, line: Line, count: int, routes: Routes, trouble: _Trouble) -> None:
        self._line, self._count, self._routes, self._trouble = line, count, routes, trouble
        self._ready: queue.Queue[tuple[bytes, Tensor, Tensor | None]] = queue.Queue(LOOKAHEAD)
        name = f"from-{line.peer}-{line.kind}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def get(self) -> tuple[bytes, Tensor, Tensor | None]:
        """A message's form, its frame on the host, and the one on the device if there may be."""
        while True:
            try:
                return self._ready.get(timeout=_LOOK_S)
            except queue.Empty:
                self._trouble.look()

    def _run(self) -> None:
        try:
            form, size, apart_size = b"", _HEADER, 0
            for _ in range(self._count):
                frame = self._next(size)
                flag, form_bytes, new_size = frame[:24].view(torch.int64).tolist()
                if flag == _NOTICE:
                    form, size = self._next(form_bytes).numpy().tobytes(), new_size
                    apart_size = apart_bytes(form)
                    frame = self._next(size)
                self._ready.put((form, frame, self._apart(apart_size)))
        except BaseException as error:
            self._trouble.note(self._line, error)

    def _next(self, size: int) -> Tensor:
        frame = torch.empty(size, dtype=torch.uint8)
        dist.recv(frame, src=self._line.peer, tag=self._line.kind, group=self._routes.host)
        return frame

    def _apart(self, size: int) -> Tensor | None:
        direct, (_, peer, kind) = self._routes.direct, self._line
        return None if direct is None else direct.receive(size, peer, kind)


def _lost(line: Line, error: BaseException) -> WorkerError:
    return WorkerError(
        f"the connection to stage {line.peer} is lost: {type(error).__name__}: {error}. Look at "
        "what that stage says."
    )
