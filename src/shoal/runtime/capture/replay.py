"""A pass that can be run again without the code that it came from: what it is given, and leaves.

Two kinds replay one: a flat list of torch's operations (``operations.py``), and a CUDA graph
(``cudagraph.py``). Whoever trains by them knows neither (``captured.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Found(NamedTuple):
    """What a pass left: its loss, and the gradients there are, by the place of the parameter.

    The gradients are the caller's until the next replay, which may write to them.
    """

    loss: Tensor
    gradients: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward and a backward to be captured.

    ``compute`` makes the loss of the tensors of a batch, by the model's own code and on the
    model's own tensors; ``trained`` are the parameters whose gradients are wanted, and
    ``accumulate`` what the loss is divided by before the backward. ``known`` are the ids of
    tensors that the code has for good besides.
    """

    model: nn.Module
    compute: Callable[[Sequence[Tensor]], Tensor]
    trained: Sequence[nn.Parameter]
    accumulate: int
    known: frozenset[int]

    def loss_and_root(self, leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The loss, and what the backward begins at."""
        loss = self.compute(leaves)
        return loss, loss if self.accumulate == 1 else loss / self.accumulate


class Replay(Protocol):
    """A pass that was captured."""

    def run(self, leaves: Sequence[Tensor]) -> Found:
        """The pass on another batch: draws, writes buffers, and computes as the code does.

        ``leaves``: the tensors of a batch of the layout that was captured.

        Raises:
            Moved: it is of tensors that are elsewhere by now, and has to be made again.
        """
        ...

    def let_go(self) -> None:
        """Hold on to no memory of the device."""
        ...


class Moved(Exception):
    """A tensor of the trial's is elsewhere than when its pass was captured."""


class Untraceable(Exception):
    """A pass cannot be captured; says why, in words that follow 'its pass is not captured: '."""


class OtherBits(Untraceable):
    """It computes what the pass does, but for some bits."""


@contextmanager
def told_of_capture(*, tells: bool) -> Iterator[Callable[[], bool]]:
    """Whether code that asks torch if its kernels are being captured is told so.

    Gives who says whether any asked while they were.
    """
    real: Callable[[], bool] = torch.cuda.is_current_stream_capturing
    asked: list[bool] = []

    def answer() -> bool:
        if not real():
            return False
        asked.append(True)
        return tells

    torch.cuda.is_current_stream_capturing = answer
    try:
        yield lambda: bool(asked)
    finally:
        torch.cuda.is_current_stream_capturing = real


VALUE = "_local_scalar_dense"  # the operation by which Python has a number of a tensor


@contextmanager
def in_words() -> Iterator[None]:
    """What goes wrong inside is why nothing is captured; but for a lack of memory.

    Raises:
        Untraceable: something did.
    """
    try:
        yield
    except (Untraceable, Moved, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if VALUE in str(error):
            raise Untraceable("its code makes a Python value of a tensor") from error
        words = (str(error).strip().splitlines() or [""])[0][:160]
        raise Untraceable(f"{type(error).__name__}: {words}") from error
