"""What an array consists of at one moment, and what a backend is asked to do with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shoal.fusion.member import Member
from shoal.fusion.passes.streams import SlotStreams
from shoal.fusion.rows.laidup import Holders, holders_of
from shoal.fusion.rows.stacked import Stacked

Parts = Sequence[Callable[[], Any]]
"""Calls of optimizers' kernels, each on memory that the others have no part in."""


@dataclass(slots=True)
class Crew:
    """The members in their slots, with their tensors and random streams.

    ``looped``: parts of their models that run slot by slot since code in them decides by data
    (``core.arraykeys.LOOPED``); None: passes find them, and go on with them looped.
    """

    members: Sequence[Member]
    stacked: Stacked
    streams: SlotStreams
    device: torch.device
    looped: Sequence[str] | None = None
    _holders: dict[int, tuple[nn.Module, Holders]] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return len(self.members)

    def holders(self, slot: int) -> Holders:
        """Where the attributes of the slot's own module are."""
        module = self.members[slot].module
        known = self._holders.get(slot)
        if known is None or known[0] is not module:
            known = self._holders[slot] = (module, holders_of(module))
        return known[1]


def taking_part(active: Sequence[bool]) -> list[int]:
    """The slots that do."""
    return [slot for slot, is_active in enumerate(active) if is_active]


def idle_slots(active: Sequence[bool]) -> list[int]:
    """The others."""
    return [slot for slot, is_active in enumerate(active) if not is_active]


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


class Steps(Protocol):
    """Launches the steps of an array's optimizers."""

    def __call__(self, what: Any, parts: Callable[[], Parts]) -> None:
        """Do what ``parts`` do, or launch what they were captured to when ``what`` was the same.

        ``what`` says where all of their tensors are, and all of their numbers.
        """
        ...


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

    @property
    def by_data(self) -> Sequence[str]:
        """Parts that run slot by slot because slots came to decide otherwise there."""
        ...

    @property
    def steps(self) -> Steps | None:
        """Who launches the steps of this array's optimizers; None if they are called."""
        ...


COPIED_AT_ONCE = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128),
    )
)
"""Types of which CUDA has a kernel for many tensors; of others (uint16) it refuses."""


def copy_all(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors into others, those of one type and device at once; on a GPU nobody waits."""
    alike: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for place, value in zip(places, values, strict=True):
        mine, given = alike.setdefault((value.dtype, value.device), ([], []))
        mine.append(place)
        given.append(value)
    for (dtype, _), (mine, given) in alike.items():
        if dtype in COPIED_AT_ONCE:
            torch._foreach_copy_(mine, given, non_blocking=True)
        else:
            for place, value in zip(mine, given, strict=True):
                place.copy_(value, non_blocking=True)


@dataclass(slots=True)
class Undo:
    """Buffers as they were, to be put back for some slots or all."""

    kept: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, stacked: Stacked, leave_out: Sequence[str] = (), idle: Sequence[int] = ()) -> Undo:
        """All buffers of ``stacked``; of those that never changed so far the rows of ``idle``."""
        buffers = stacked.buffers.items()
        found = [(name, b) for name, b in buffers if name not in leave_out]
        kept = {name: torch.empty_like(b) for name, b in found}
        with torch.no_grad():
            copy_all([*kept.values()], [b for _, b in found])
        rows = {name: {i: b[i].clone() for i in idle} for name, b in buffers if name in leave_out}
        return cls(kept, rows)

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
