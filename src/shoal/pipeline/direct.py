"""Frames from one device's memory to another's, without the host: for NCCL, and tested on gloo.

[Note: turns]
NCCL has no tags, and what it was asked for stands on the device until the other side asks for its
half. What stands there may keep a device from what the other side waits for (a free that waits for
the whole device, a kernel that is loaded late), and nothing is promised of several at a time. So
nothing is posted ahead, and a device has one transfer at a time, its *turn*:

    sender      the frame is written and the device says so; then its notice goes, by the host
    receiver    takes memory for it, and asks for it, by the host
    both        take their turn, the lower rank first; post their half; wait; give the turn back

The lower rank has its turn before the higher one hears of it. Who holds a turn waits for a higher
rank only, so ranks never wait for each other in a circle; and as a device has no other transfer,
all that can keep it from posting its half is computing, which ends. That holds for any number of
lines, and needs one group for all of them. Posting comes after the word, since a pair's first
transfers make its communicator and connect it, and do not return before both sides have posted.
It costs a word or two between the hosts for each frame, on helpers' threads: no thread that
computes waits for a device here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.core.errors import WorkerError
from shoal.pipeline.packing import Bundle

_ASK, _GO = 64, 128  # added to a line's kind: the tags of the words on it
_SHORTEST_S, _LONGEST_S = 20e-6, 1e-3


class Loaded(NamedTuple):
    """A frame that is being written on the device, and what says when it is."""

    frame: Tensor
    written: torch.cuda.Event | None

    def wait(self) -> None:
        """Until it is written; on a thread that does not compute."""
        if self.written is not None:
            self.written.synchronize()


class Direct:
    """Carries frames between devices' memory; its methods are called by a thread for each line.

    Args:
        group: All ranks, of a backend that takes this device's memory.
        host: All ranks, of gloo's; None for the default group.
        rank: This one.
        device: Where frames lie; with its index.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        host: dist.ProcessGroup | None,
        rank: int,
        device: torch.device,
    ) -> None:
        self.group, self.device = group, device
        self._host, self._rank = host, rank
        self._turn, self._given_up = threading.Lock(), threading.Event()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def load(self, bundle: Bundle) -> Loaded:
        """Copy tensors into a frame; on the thread that computes, in its stream's order."""
        frame = torch.empty(bundle.num_bytes, dtype=torch.uint8, device=self.device)
        bundle.write(frame, 0)
        if self._stream is None:
            return Loaded(frame, None)
        written = torch.cuda.Event(blocking=True)
        written.record(torch.cuda.current_stream(self.device))
        return Loaded(frame, written)

    def send(self, frame: Tensor, peer: int, kind: int) -> None:
        """Send a frame that is written, and has been announced; returns when it has left."""
        self._hear(peer, _ASK + kind)
        with self._my_turn():
            if self._rank < peer:
                self._say(peer, _GO + kind)
            self._finish(self._post_send(frame, peer))

    def receive(self, num_bytes: int, peer: int, kind: int) -> Tensor:
        """The frame that was announced; it is whole when this returns."""
        with self._here():
            frame = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if not num_bytes:
            return frame
        if self._rank > peer:
            self._say(peer, _ASK + kind)
            self._hear(peer, _GO + kind)
        with self._my_turn():
            if self._rank < peer:
                self._say(peer, _ASK + kind)
            self._finish(self._post_receive(frame, peer))
        return frame

    def hand_over(self, frame: Tensor) -> None:
        """The thread that computes uses it from now on: its memory waits for that stream too."""
        if self._stream is not None:
            frame.record_stream(torch.cuda.current_stream(self.device))

    def give_up(self) -> None:
        """Have transfers that wait for a lost peer end with an error."""
        self._given_up.set()

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        with self._turn, self._here():
            yield

    @contextmanager
    def _here(self) -> Iterator[None]:
        """A helper's thread works on this device, in a stream of all helpers."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def _post_send(self, frame: Tensor, peer: int) -> dist.Work | None:
        return dist.isend(frame, dst=peer, group=self.group)

    def _post_receive(self, frame: Tensor, peer: int) -> dist.Work | None:
        return dist.irecv(frame, src=peer, group=self.group)

    def _finish(self, work: dist.Work | None) -> None:
        """Wait on the host, so that the turn is given back when the device is through."""
        assert work is not None
        work.wait()  # of NCCL's: the helpers' stream waits
        if self._stream is None:
            return
        done = torch.cuda.Event()
        done.record(self._stream)
        begun = time.monotonic()
        while not done.query():
            if self._given_up.is_set():
                raise WorkerError("another line of this stage is lost.")
            waited = time.monotonic() - begun
            time.sleep(min(max(waited / 8, _SHORTEST_S), _LONGEST_S))

    def _say(self, peer: int, tag: int) -> None:
        dist.send(torch.zeros(1, dtype=torch.uint8), dst=peer, tag=tag, group=self._host)

    def _hear(self, peer: int, tag: int) -> None:
        dist.recv(torch.empty(1, dtype=torch.uint8), src=peer, tag=tag, group=self._host)
