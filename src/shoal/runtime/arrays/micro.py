"""A micro-batch of an array in shards: what of it is on the device, for all slots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.fusion.crew import taking_part
from shoal.fusion.passes.streams import States
from shoal.partition.wires import Wire
from shoal.runtime.units import Micro


class Result(NamedTuple):
    """What the last shard's unit comes to: losses [N], NaN where there is none, and outputs."""

    losses: Tensor
    outputs: Sequence[Any] = ()
    counted: Sequence[bool] = ()  # slots that took part

    @classmethod
    def of_each(cls, width: int, found: Mapping[int, tuple[Tensor, Any]]) -> Result:
        """Of slots that were evaluated by themselves: loss and output of each."""
        losses = torch.full((width,), math.nan, dtype=torch.float64)
        for slot, (loss, _) in found.items():
            losses[slot] = loss
        return cls(losses, [found[slot][1] if slot in found else None for slot in range(width)])


class Apart(NamedTuple):
    """What enters a shard for a slot that runs by itself."""

    slot: int
    wire: Any


@dataclass(slots=True)
class StackedMicro(Micro):
    """One micro-batch of all slots. ``batch``: of each slot its own, None where there is none.

    Attributes:
        active: Slots that run together.
        apart: What is left of those that run by themselves, by slot.
        failures: Why slots take no part any more.
        is_last: Whether it is the last of its step.
        returned: Wires that have waited elsewhere, in memory that is nobody else's.
    """

    dims: dict[Wire, int | None] = field(default_factory=dict)
    streams: dict[int, States] = field(default_factory=dict)  # before each shard's forward
    active: list[bool] = field(default_factory=list)
    apart: dict[int, Micro] = field(default_factory=dict)
    failures: dict[int, BaseException] = field(default_factory=dict)
    is_last: bool = True
    returned: set[Wire] = field(default_factory=set)

    @property
    def taking(self) -> list[int]:
        """Those that run together."""
        return taking_part(self.active)

    def has_wire(self, wire: Any) -> bool:
        """Whether it is on the device, or nobody is to read it any more."""
        if isinstance(wire, Apart):
            own = self.apart.get(wire.slot)
            return own is None or own.has_wire(wire.wire)
        return not any(self.active) or Micro.has_wire(self, wire)

    def forget_wire(self, wire: Any) -> None:
        """It waits elsewhere now."""
        if isinstance(wire, Apart):
            self.apart[wire.slot].forget_wire(wire.wire)
        else:
            Micro.forget_wire(self, wire)

    def put_wire(self, wire: Any, tensor: Tensor) -> None:
        """It is back."""
        if isinstance(wire, Apart):
            self.apart[wire.slot].put_wire(wire.wire, tensor)
        else:
            Micro.put_wire(self, wire, tensor)
            self.returned.add(wire)

    def tensors(self) -> list[Tensor]:
        """Everything held, for the byte count."""
        own = Micro.tensors(self)
        return own + [tensor for micro in self.apart.values() for tensor in micro.tensors()]
