"""Embeddings: the tables of all slots as one, with shifted indices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.fusion.passes.slots import Slots
from shoal.fusion.rows.level import plainly


def embedding(
    slots: Slots,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Rows of weight_NVD; those of the padding pass no gradient back, in any slot."""
    if not slots.has_values(weight):
        return NotImplemented
    if sparse or scale_grad_by_freq:
        args = (weight, indices, padding_idx, scale_grad_by_freq, sparse)
        return slots.each(torch.embedding, args)
    table, index = slots.stacked(weight), slots.stacked(indices)
    with plainly():
        size = table.shape[1]
        _require_range(slots, index, size)
        first = torch.arange(slots.width, device=index.device) * size
        rows = index + first.view(-1, *([1] * (index.dim() - 1)))
        out = torch.embedding(table.flatten(0, 1), rows)
        if padding_idx >= 0:
            padding = (index == padding_idx).unsqueeze(-1)
            out = torch.where(padding, out.detach(), out)
    return slots.slotted(out)


def _require_range(slots: Slots, index: Tensor, size: int) -> None:
    """Refuse an index that would read a neighbour's rows in a table of all slots.

    Raises:
        IndexError: as torch does for one trial.
    """
    if not index.numel():
        return
    least, most = torch.aminmax(index)

    def beyond() -> IndexError:
        return IndexError(f"index out of range: {int(least)} to {int(most)}, of {size} rows")

    slots.outside.require((least >= 0) & (most < size), beyond)
