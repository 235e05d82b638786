"""Dropout: each slot's mask comes from its own generator, as its trial would draw it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.fusion.passes.outside import Mask
from shoal.fusion.passes.slots import Slots
from shoal.fusion.rows.layout import one_alone
from shoal.fusion.rows.level import plainly
from shoal.fusion.rows.perslot import values_of


def dropout(slots: Slots, input: Tensor, p: float, train: bool) -> Any:
    """The input times every slot's mask."""
    if not train or not any(values_of(p, slots.width)):
        return input
    x = slots.stacked(input)
    with plainly():
        out = x * masks(slots, one_alone(x), p)
    return slots.slotted(out)


def dropout_(slots: Slots, input: Tensor, p: float, train: bool) -> Any:
    """The same, in place."""
    return _in_place(slots, input, p, train, whole_channels=False)


def feature_dropout(slots: Slots, input: Tensor, p: float, train: bool) -> Any:
    """Dropout of whole channels: of ``nn.Dropout1d``, ``2d`` and ``3d``."""
    if not train or not any(values_of(p, slots.width)):
        return input
    x = slots.stacked(input)
    with plainly():
        out = x * masks(slots, _one_per_channel(x[0]), p)
    return slots.slotted(out)


def feature_dropout_(slots: Slots, input: Tensor, p: float, train: bool) -> Any:
    """The same, in place."""
    return _in_place(slots, input, p, train, whole_channels=True)


def _in_place(slots: Slots, input: Tensor, p: float, train: bool, *, whole_channels: bool) -> Any:
    if not train or not any(values_of(p, slots.width)):
        return input
    if not slots.has_values(input):
        raise RuntimeError("vmap: dropout_ writes into a tensor that all slots share")
    x = slots.stacked(input)
    with plainly():
        x.mul_(masks(slots, _one_per_channel(x[0]) if whole_channels else one_alone(x), p))
    return input


def _one_per_channel(x_BC: Tensor) -> Tensor:
    return x_BC.new_empty((*x_BC.shape[:2], *([1] * (x_BC.dim() - 2))))


def masks(slots: Slots, one: Tensor, p: float) -> Tensor:
    """Zeros and 1 / (1 - p) in the shape of ``one``, for every slot: [N, ...]."""
    return slots.outside.masks(Mask.like(one, p, slots.width))
