"""What an array consists of at one moment, and what a backend is asked to do with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.fusion.member import Member
from shoal.fusion.stacked import Stacked
from shoal.fusion.streams import SlotStreams


@dataclass(slots=True)
class Crew:
    """The members in their slots, with their tensors and random streams."""

    members: Sequence[Member]
    stacked: Stacked
    streams: SlotStreams
    device: torch.device

    @property
    def width(self) -> int:
        return len(self.members)


class Trained(NamedTuple):
    """What one batch for every slot came to.

    ``losses`` are plain numbers [N], those of slots that took no part are NaN. ``failures``
    are the errors of slots whose own code or data raised; the others are not touched by it.
    """

    losses: Tensor
    failures: Mapping[int, BaseException]


class Evaluated(NamedTuple):
    """Losses [N] without gradients, and every slot's output as its model alone gives it."""

    losses: Tensor
    outputs: Sequence[Any]


class ArrayBackend(Protocol):
    """Runs the forward and backward of all slots; ``active`` says which take part.

    A slot that does not take part keeps its bits: buffers, random streams, and the gradients
    it is given. After ``Declined``, random streams and buffers are as before the call.
    """

    @property
    def stacks_gradients(self) -> bool:
        """Whether ``train`` leaves them with the stacked parameters, not with each slot's own."""
        ...

    def train(
        self, crew: Crew, batches: Sequence[Any], active: Sequence[bool], scale: float
    ) -> Trained:
        """Add the gradients of each slot's loss times ``scale`` to its parameters'.

        Raises:
            Declined: this backend cannot run these models; says why.
        """
        ...

    def evaluate(self, crew: Crew, batches: Sequence[Any], active: Sequence[bool]) -> Evaluated:
        """Losses and outputs; the modules are in evaluation mode already."""
        ...

    def changed(self, crew: Crew) -> None:
        """The crew has other members than before."""
        ...

    def require(self, member: Member) -> None:
        """Look at a trial that is to join.

        Raises:
            Declined: this backend cannot run it among the others.
        """
        ...

    def hand_out(self, crew: Crew, slots: Sequence[int]) -> None:
        """Put these slots' gradients where their optimizers look, if they are not there."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """In words, what runs slot by slot and why."""
        ...


@dataclass(slots=True)
class Undo:
    """Buffers as they were, to be put back for some slots or all."""

    kept: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, stacked: Stacked, leave_out: Sequence[str] = (), idle: Sequence[int] = ()) -> Undo:
        """All buffers of ``stacked``; of those that never changed so far the rows of ``idle``."""
        buffers = stacked.buffers.items()
        return cls(
            {name: b.clone() for name, b in buffers if name not in leave_out},
            {name: {i: b[i].clone() for i in idle} for name, b in buffers if name in leave_out},
        )

    def put_back(self, stacked: Stacked, slots: Sequence[int] | None = None) -> None:
        """For ``slots``, or for all; autograd, which may have saved them, does not notice."""
        for name, before in self.kept.items():
            if slots is None:
                stacked.buffers[name].data.copy_(before)
            else:
                for slot in slots:
                    stacked.buffers[name].data[slot] = before[slot]
        for name, rows in self.rows.items():
            for slot, row in rows.items():
                if slots is None or slot in slots:
                    stacked.buffers[name].data[slot] = row
