"""Memory that two processes share for frames, whose socket carries only the word of them.

[Note: slots]
A slot is the sender's; the receiver maps it too, by a descriptor that comes with its first frame.

    sender      free, then taken for a frame, which is written there; free when it is told so
    receiver    copies the frame to its device when its RECV comes, and says so

A sender has MOST_SLOTS to a peer, of the sizes that frames lately had; what finds none goes over
the socket, as all does until the receiver has seen a trial's bytes in one. Both ends let go of a
slot when their socket ends, and it is gone when both have: nothing is left of a process that dies.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_BYTES = 2**18
"""Smaller frames go over the socket."""
MOST_SLOTS = 8
MOST_TIMES = 4
"""A slot may be so many times its frame; a larger one is kept for larger frames."""
_TRIAL_BYTES = 2**12


@dataclass(slots=True)
class Slot:
    """A sender's piece of memory; ``descriptor`` until the receiver has it."""

    number: int
    memory: Tensor
    descriptor: int
    is_free: bool = False


class Slots:
    """The slots of one sender for one receiver; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[int, Slot] = {}
        self._next = 0

    def take(self, num_bytes: int) -> tuple[Slot | None, list[int]]:
        """A slot for a frame, if there is one, and the numbers of slots that gave way to it."""
        with self._lock:
            free = [slot for slot in self._slots.values() if slot.is_free]
            large = [s for s in free if num_bytes <= s.memory.numel() <= MOST_TIMES * num_bytes]
            if large:
                slot = min(large, key=lambda slot: slot.memory.numel())
                slot.is_free = False
                return slot, []
            given_up = free if len(self._slots) == MOST_SLOTS else []  # other frames' sizes
            for slot in given_up:
                del self._slots[slot.number]
            if len(self._slots) == MOST_SLOTS:
                return None, []
            return self._made(num_bytes), [slot.number for slot in given_up]

    def free(self, number: int) -> None:
        """The receiver is done with it."""
        with self._lock:
            if number in self._slots:
                self._slots[number].is_free = True

    def close(self) -> None:
        """Let go of all; what was sent and not read yet is the receiver's."""
        with self._lock:
            for slot in self._slots.values():
                close_descriptor(slot)
            self._slots.clear()

    def _made(self, num_bytes: int) -> Slot | None:
        try:
            descriptor = os.memfd_create("shoal-frames")
        except OSError:
            return None
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)  # a write past what is there would kill
            memory = mapped(descriptor, num_bytes)
        except OSError:
            os.close(descriptor)
            return None
        slot = Slot(self._next, memory, descriptor)
        self._slots[slot.number], self._next = slot, self._next + 1
        return slot


def close_descriptor(slot: Slot) -> None:
    """The receiver has it, or never will."""
    descriptor, slot.descriptor = slot.descriptor, -1
    if descriptor >= 0:
        os.close(descriptor)


def mapped(descriptor: int, num_bytes: int) -> Tensor:
    """The memory of a descriptor, which may be closed; it is unmapped with the last view.

    Raises:
        OSError: it cannot be mapped.
    """
    place = f"/proc/self/fd/{descriptor}"  # unlike mmap, torch keeps no descriptor of its own
    try:
        return torch.from_file(place, shared=True, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error)) from error


def can_share(sock: socket.socket) -> bool:
    """Whether descriptors can be sent over this socket."""
    return sock.family == socket.AF_UNIX and hasattr(os, "memfd_create")


def write_trial(slot: Slot) -> None:
    """Bytes that the receiver knows."""
    slot.memory[:_TRIAL_BYTES] = _trial()


def is_trial(memory: Tensor) -> bool:
    """Whether they are there."""
    return torch.equal(memory[:_TRIAL_BYTES], _trial())


def _trial() -> Tensor:
    return (torch.arange(_TRIAL_BYTES) * 37 % 251).to(torch.uint8)
