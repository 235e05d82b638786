"""LSTM and GRU: one step of time for all slots at once, where the layers are narrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.fusion.passes.slots import Slots
from shoal.fusion.rows.level import plainly
from shoal.fusion.rows.perslot import values_of
from shoal.fusion.rules.dropout import masks
from shoal.fusion.rules.linear import cast, products

WIDEST = 64
"""Hidden units up to which steps in Python beat the lone kernel in turn; see benchmarks/fusion."""

Cell = Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]
Layers = tuple[bool, int, float, bool, bool, bool]  # biases, layers, dropout, train, both ways,
#                                                     rows first: as the operations take them


def lstm(slots: Slots, input: Tensor, *rest: Any) -> Any:
    """``torch.lstm`` of a padded batch; packed ones and wide layers run slot by slot."""
    found = _run(slots, input, rest, _lstm_cell, states=2)
    if found is None:
        return slots.each(torch.lstm, (input, *rest))
    return found


def gru(slots: Slots, input: Tensor, *rest: Any) -> Any:
    """``torch.gru``; as above."""
    found = _run(slots, input, rest, _gru_cell, states=1)
    if found is None:
        return slots.each(torch.gru, (input, *rest))
    return found


def _run(slots: Slots, input: Tensor, rest: Any, cell: Cell, states: int) -> Any:
    """Outputs and last states, or None where the lone kernel in turn is the better way."""
    if len(rest) != 8 or not isinstance(rest[2], bool):
        return None  # packed: the sizes of its batches come first
    hidden, weights, biases, layers, dropout, train, both_ways, rows_first = rest
    first = (hidden[0] if states == 2 else hidden).shape[-1]
    if first > WIDEST or len(weights) != (4 if biases else 2) * layers * (2 if both_ways else 1):
        return None
    if input.dim() != 3:
        return None
    x = slots.stacked(input)
    start = [slots.stacked(t) for t in (hidden if states == 2 else (hidden,))]
    if _has_kernel(x.device, states):
        x, start = cast(x), [cast(t) for t in start]
    stacked = [slots.stacked(w) for w in weights]
    settings = (biases, layers, dropout, train, both_ways, rows_first)
    with plainly():
        out, last = _through_layers(slots, x, start, stacked, settings, cell)
    return (slots.slotted(out), *(slots.slotted(t) for t in last))


def _has_kernel(device: torch.device, states: int) -> bool:
    """Whether a library computes a lone layer: autocast casts what it is given, and its states.

    cuDNN knows both kinds, oneDNN LSTMs.
    """
    if device.type == "cpu":
        return (
            states == 2 and torch._C._get_mkldnn_enabled() and torch.backends.mkldnn.is_available()
        )
    return device.type == "cuda" and torch.backends.cudnn.enabled


def _through_layers(
    slots: Slots,
    x: Tensor,
    start: Sequence[Tensor],
    weights: Sequence[Tensor],
    settings: Layers,
    cell: Cell,
) -> tuple[Tensor, list[Tensor]]:
    biases, layers, dropout, train, both_ways, rows_first = settings
    x_NTBI = x.transpose(1, 2) if rows_first else x
    ways = 2 if both_ways else 1
    each = _directions(weights, 4 if biases else 2)
    last: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outs = []
        for way in range(ways):
            at = tuple(t[:, layer * ways + way] for t in start)
            out, state = _through_time(x_NTBI, at, next(each), cell, backwards=way == 1)
            outs.append(out)
            last.append(state)
        x_NTBI = outs[0] if ways == 1 else torch.cat(outs, -1)
        if train and layer < layers - 1 and any(values_of(dropout, slots.width)):
            x_NTBI = x_NTBI * masks(slots, x_NTBI[0], dropout)
    states = [torch.stack([s[i] for s in last], 1) for i in range(len(start))]
    return x_NTBI.transpose(1, 2) if rows_first else x_NTBI, states


def _directions(weights: Sequence[Tensor], size: int) -> Iterator[Sequence[Tensor]]:
    return (weights[at : at + size] for at in range(0, len(weights), size))


def _through_time(
    x_NTBI: Tensor,
    state: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    cell: Cell,
    *,
    backwards: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction: the inputs' part is a single product for all times."""
    w_in, w_hidden, *b = weights
    b_in, b_hidden = b or (None, None)
    slots, times, rows, _ = x_NTBI.shape
    flat = x_NTBI.reshape(slots, times * rows, -1)
    from_input = products(flat, w_in, b_in).unflatten(1, (times, rows)).unbind(1)
    outs = []
    for x_NBG in reversed(from_input) if backwards else from_input:
        state = cell(x_NBG, products(state[0], w_hidden, b_hidden), state)
        outs.append(state[0])
    return torch.stack(outs[::-1] if backwards else outs, 1), state


def _lstm_cell(x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    entry, forget, new, leave = (x + h).chunk(4, -1)
    kept = forget.sigmoid() * state[1] + entry.sigmoid() * new.tanh()
    return leave.sigmoid() * kept.tanh(), kept


def _gru_cell(x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x_reset, x_update, x_new = x.chunk(3, -1)
    h_reset, h_update, h_new = h.chunk(3, -1)
    new = (x_new + (x_reset + h_reset).sigmoid() * h_new).tanh()
    return (new + (x_update + h_update).sigmoid() * (state[0] - new),)
