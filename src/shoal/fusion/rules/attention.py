"""Attention: slots and rows are one dimension, and the kernel is the lone trial's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shoal.fusion.passes.slots import Slots
from shoal.fusion.rows.level import plainly
from shoal.fusion.rows.perslot import values_of
from shoal.fusion.rules.dropout import masks


def attention(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """``scaled_dot_product_attention`` of q_NBHTD, with N times B rows."""
    if query.dim() not in (3, 4) or not slots.has_values(query, key, value):
        return NotImplemented
    rates = values_of(dropout_p, slots.width)
    if any(rates) and (enable_gqa or query.device.type != "cpu"):
        return slots.each(
            functional.scaled_dot_product_attention,
            (query, key, value, attn_mask, dropout_p, is_causal),
            {"scale": scale, "enable_gqa": enable_gqa},
        )
    rows = query.shape[0]
    q_k_v = [slots.stacked(t) for t in (query, key, value)]
    mask = None
    if attn_mask is not None:
        mask = slots.stacked(attn_mask.expand(rows, *_behind_rows(attn_mask, query.dim())))
    kinds = (is_causal, scale)
    with plainly():
        if all(rates):
            return slots.slotted(_dropping(slots, q_k_v, mask, dropout_p, *kinds))
        if not any(rates):
            return slots.slotted(_keeping(q_k_v, mask, *kinds, enable_gqa=enable_gqa))
        # Each kernel for the slots that would take it alone.
        found: dict[int, Tensor] = {}
        parts = [t.unbind(0) for t in (*q_k_v, *([] if mask is None else [mask]))]
        for drops in (False, True):
            mine = [slot for slot, rate in enumerate(rates) if bool(rate) is drops]
            q, k, v, *m = (torch.stack([part[slot] for slot in mine]) for part in parts)
            some = m[0] if m else None
            if drops:
                out = _dropping(slots, (q, k, v), some, dropout_p, *kinds, mine)
            else:
                out = _keeping((q, k, v), some, *kinds)
            found |= dict(zip(mine, out.unbind(0), strict=True))
        return slots.slotted(torch.stack([found[slot] for slot in range(slots.width)]))


def _keeping(
    q_k_v: Sequence[Tensor],
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    *,
    enable_gqa: bool = False,
) -> Tensor:
    """Without dropout, by the kernel that a lone trial takes."""
    q, k, v = (t.flatten(0, 1) for t in q_k_v)
    out: Tensor = functional.scaled_dot_product_attention(
        *(q, k, v),
        None if mask is None else mask.flatten(0, 1),
        *(0.0, is_causal),
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return torch.unflatten(out, 0, (len(q_k_v[0]), -1))


def _behind_rows(mask: Tensor, dims: int) -> tuple[int, ...]:
    """The mask's sizes behind the rows, for inputs of ``dims`` dimensions."""
    sizes = (1,) * (dims - mask.dim()) + tuple(mask.shape)
    return sizes[1:]


def _dropping(
    slots: Slots,
    q_k_v: Sequence[Tensor],
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    mine: Sequence[int] | None = None,
) -> Tensor:
    """With dropout a lone trial on the CPU takes the kernel in plain steps, and so do slots.

    ``mine`` are the slots that ``q_k_v`` is of, if not all.
    Source: torch's ``_scaled_dot_product_attention_math``, which scales queries and keys.
    """
    query, key, value = q_k_v
    factor = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scores = torch.matmul(query * factor, key.transpose(-2, -1) * factor)
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~ahead, -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1)
    drawn = masks(slots, weights[0], dropout_p)
    return torch.matmul(weights * (drawn if mine is None else drawn[list(mine)]), value)
