"""Attention: slots and rows are one dimension, and the kernel is the lone trial's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shoal.fusion.level import plainly
from shoal.fusion.perslot import values_of
from shoal.fusion.rules.dropout import masks
from shoal.fusion.slots import Slots


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
    drops = any(values_of(dropout_p, slots.width))
    if drops and (enable_gqa or query.device.type != "cpu"):
        return slots.each(
            functional.scaled_dot_product_attention,
            (query, key, value, attn_mask, dropout_p, is_causal),
            {"scale": scale, "enable_gqa": enable_gqa},
        )
    rows = query.shape[0]
    q, k, v = (slots.stacked(t) for t in (query, key, value))
    mask = None
    if attn_mask is not None:
        mask = slots.stacked(attn_mask.expand(rows, *_behind_rows(attn_mask, query.dim())))
    with plainly():
        if drops:
            return slots.slotted(_dropping(slots, (q, k, v), mask, dropout_p, is_causal, scale))
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        mask = None if mask is None else mask.flatten(0, 1)
        out = functional.scaled_dot_product_attention(
            q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return slots.slotted(out.unflatten(0, (slots.width, -1)))


def _behind_rows(mask: Tensor, dims: int) -> tuple[int, ...]:
    """The mask's sizes behind the rows, for inputs of ``dims`` dimensions."""
    sizes = (1,) * (dims - mask.dim()) + tuple(mask.shape)
    return sizes[1:]


def _dropping(
    slots: Slots,
    q_k_v: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """With dropout a lone trial on the CPU takes the kernel in plain steps, and so do slots.

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
    return torch.matmul(weights * masks(slots, weights[0], dropout_p), value)
