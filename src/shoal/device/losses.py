"""The losses of a step, brought to the host while the device goes on.

[Note: when a loss is read]
``loss.item()`` waits for the GPU, and nothing is in its queue when it is through. So on a GPU a
loss is copied to pinned memory behind the backward that made it, and waited for once a step:

    on_nonfinite    "fail"                          "ignore"
    read            before anything steps           when the step is over

    thread     B m0    B m1    (wait)  STEP    B m0 of the next step ...
    compute     B m0 | copy | B m1 | copy |     STEP | B m0 ...

With steps on the host it is their thread that waits, and the one that serves the GPU goes on. On
a CPU a loss is there when it is made, and read at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from shoal.core.errors import TrialError

PLACE_BYTES = 16  # of the widest number there is


def not_finite(loss: float, step: int, whose: str = "") -> TrialError:
    """What is raised before a step, counted from 1, whose loss is infinite or NaN.

    ``whose``: in words, where it is not all of the trial's.
    """
    of = f" of {whose}" if whose else ""
    return TrialError(
        f"the loss of step {step} is {loss}{of}; the trial stops before the step. Lower the "
        "learning rate, clip the gradients, or pass Recipe(on_nonfinite='ignore') to train on."
    )


class Readback(Protocol):
    """How the numbers of a step come to the host; there is one for all steps of a trial."""

    def send(self, index: int, value: Tensor) -> float | None:
        """Have a number brought, as the ``index``-th; the number itself, if it is here already."""
        ...

    def wait(self) -> None:
        """Block until all that was sent is here."""
        ...

    def read(self, index: int) -> float:
        """A number that was sent and waited for; until another one is sent in its place."""
        ...


class Arrival(Protocol):
    """An event, recorded behind copy after copy; the last one is waited for."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class CudaArrival:
    """Of the stream that is current when it is recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(blocking=True)  # who waits for it sleeps

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self._event.synchronize()


class AtOnce:
    """Of a device whose memory is the host's."""

    def send(self, index: int, value: Tensor) -> float:
        return float(value.item())

    def wait(self) -> None:
        return None

    def read(self, index: int) -> float:
        raise AssertionError("it was told when it was sent")


class Behind:
    """Copies behind what the current stream has to do, into memory that was made before.

    Args:
        places: How many numbers there is memory for from the beginning.
        arrived: Recorded behind every copy.
        pin: Whether the memory is pinned: only then does a copy from a GPU not wait.
    """

    def __init__(self, places: int, arrived: Arrival, *, pin: bool = True) -> None:
        self._arrived, self._pin = arrived, pin
        self._places: list[Tensor] = []
        self._sent: dict[int, Tensor] = {}
        self._make(places)

    def send(self, index: int, value: Tensor) -> None:
        if index >= len(self._places):
            self._make(index + 1)
        # As wide as the number is: to convert it would take memory of the device.
        place = self._places[index][: value.element_size()].view(value.dtype)
        place.copy_(value.detach().reshape(1), non_blocking=True)
        self._sent[index] = place
        self._arrived.record()

    def wait(self) -> None:
        self._arrived.synchronize()

    def read(self, index: int) -> float:
        return float(self._sent[index].item())

    def _make(self, count: int) -> None:
        memory = torch.empty(count * PLACE_BYTES, dtype=torch.uint8, pin_memory=self._pin)
        self._places += memory.split(PLACE_BYTES)


def readback_of(device: torch.device, places: int) -> Readback:
    """How numbers come to the host from a device."""
    if device.type != "cuda":
        return AtOnce()
    with torch.cuda.device(device):  # pinning makes a context on the current one
        return Behind(places, CudaArrival(device))


class Losses:
    """The losses of one step's micro-batches; see [Note: when a loss is read].

    One thread notes them, any may ask for them. They have been asked for, or are given up, when
    the readback brings those of another step.

    Args:
        readback: How they come to the host.
        refusal: What is raised for a loss that is not finite; None: nothing is.
    """

    def __init__(
        self, readback: Readback, refusal: Callable[[float], Exception] | None = None
    ) -> None:
        self._readback, self._refusal = readback, refusal
        self._values: list[float | None] = []  # None: on its way
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def note(self, loss: Tensor) -> None:
        """A micro-batch's loss.

        Raises:
            Exception: the ``refusal``, of a loss that is here at once.
        """
        value = self._readback.send(len(self._values), loss)
        self._values.append(value)
        if value is not None:
            self._require(value)

    def add(self, value: float) -> None:
        """A loss that is on the host."""
        self._values.append(value)

    def require_finite(self) -> None:
        """Wait for all that were noted, where one that is not finite is refused.

        Raises:
            Exception: the ``refusal``, of the first that is not.
        """
        if self._refusal is not None:
            for value in self.values():
                self._require(value)

    def values(self) -> list[float]:
        """All there are, waited for; whether they are finite is not asked."""
        with self._lock:
            if None in self._values:
                self._readback.wait()
            for index, value in enumerate(self._values):
                if value is None:
                    self._values[index] = self._readback.read(index)
            return [value for value in self._values if value is not None]

    def _require(self, value: float) -> None:
        if self._refusal is not None and not math.isfinite(value):
            raise self._refusal(value)
