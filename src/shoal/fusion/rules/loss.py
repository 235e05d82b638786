"""Losses over classes: all slots' rows at once, then each slot's own mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.fusion.passes.slots import Slots
from shoal.fusion.rows.level import plainly
from shoal.fusion.rows.perslot import PerSlot

_nn: Any = torch._C._nn  # its annotations take names for the reductions, its code numbers

NONE, MEAN = 0, 1  # torch's numbers for the reductions; 2 is the sum


def cross_entropy(
    slots: Slots,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Per row by torch's kernel; rows of slots with one smoothing together.

    So a row's bits depend on its own slot's smoothing, and not on whether others differ.
    """

    def of(smoothing: float, rows: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = _nn.cross_entropy_loss(
            rows, targets, weight, NONE, ignore_index, smoothing
        )
        return found

    def per_row(rows: Tensor, targets: Tensor) -> Tensor:
        if not isinstance(label_smoothing, PerSlot):
            return of(label_smoothing, rows, targets)
        x, y = rows.chunk(slots.width), targets.chunk(slots.width)
        found: dict[int, Tensor] = {}
        for smoothing, mine in slots.by_value(label_smoothing).items():
            losses = of(
                smoothing, torch.cat([x[s] for s in mine]), torch.cat([y[s] for s in mine])
            )
            found |= dict(zip(mine, losses.chunk(len(mine)), strict=True))
        return torch.cat([found[slot] for slot in range(slots.width)])

    every = (input, target, weight, reduction, ignore_index, label_smoothing)
    return _by_rows(slots, _nn.cross_entropy_loss, per_row, every)


def nll_loss(
    slots: Slots,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> Any:
    """The same of log probabilities."""

    def per_row(rows: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = _nn.nll_loss_nd(rows, targets, weight, NONE, ignore_index)
        return found

    every = (input, target, weight, reduction, ignore_index)
    return _by_rows(slots, _nn.nll_loss_nd, per_row, every)


def _by_rows(
    slots: Slots,
    function: Callable[..., Any],
    per_row: Callable[[Tensor, Tensor], Tensor],
    every: tuple[Any, ...],
) -> Any:
    """Loss per row of x_NBC, then for each slot none, the sum, or the weighted mean [N]."""
    input, target, weight, reduction, ignore_index, *_ = every
    if input.dim() < 2 or target.is_floating_point() or slots.has_values(weight):
        return slots.each(function, every)
    x, y = slots.stacked(input), slots.stacked(target)
    with plainly():
        y_rows = y.flatten(0, 1)
        losses = per_row(x.flatten(0, 1), y_rows).unflatten(0, (slots.width, -1))
        if reduction != NONE:
            losses = losses.flatten(1).sum(1)
        if reduction == MEAN:
            losses = losses / _shares(y_rows, weight, ignore_index, losses).view(
                slots.width, -1
            ).sum(1)
    return slots.slotted(losses)


def _shares(targets: Tensor, weight: Tensor | None, ignore_index: int, like: Tensor) -> Tensor:
    """What each target counts in a mean."""
    counted = targets != ignore_index
    if weight is None:
        return counted.to(like.dtype)
    return torch.where(counted, weight[targets.where(counted, 0)], 0).to(like.dtype)
