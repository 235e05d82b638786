"""The two units a worker runs: one shard's forward, and its backward with recompute.

[Note: gradient order]
Sharded training equals plain training bit for bit only if every sum of gradients is
taken in plain autograd's order, the latest use first:

    a wire read by several shards   plain: (g_last + ...) + g_first, in one buffer.
        The sum so far enters the next backward as one more root, at the wire itself.
    a tied parameter                plain: p.grad + (g_head + g_embedding).
        A borrowing shard keeps its part apart from p.grad; it enters the owner's backward
        as one more root, at the parameter. In bf16 the same holds at its cast (``ties``).
    a root          an edge of the graph: the tensor itself may be freed before.
    a wire's layout                 a leaf would copy its gradient into its own strides.
        A wire enters through ``_Entry``, which hands the gradient out as it came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shoal.core.errors import TrialError
from shoal.partition.chain import Chain, Micro
from shoal.partition.ties import Root, TiedParts
from shoal.partition.wires import Wire, Wires
from shoal.recipe import autocast


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardResult:
    """What a backward unit hands on; parameters' gradients are in their ``.grad``.

    ``loss`` is the last shard's, undivided and detached. ``grads`` are for the wires alive
    at the shard's start, as far as they have a gradient. ``tied`` are the parts of tied
    parameters' gradients on their way to their owner.
    """

    loss: Tensor | None = None
    grads: dict[Wire, Tensor] = field(default_factory=dict)
    tied: dict[str, Tensor] = field(default_factory=dict)


def run_forward(
    chain: Chain,
    micro: Micro,
    start: int,
    stop: int,
    wires: Mapping[Wire, Tensor],
    *,
    on_resume: Callable[[], None] | None = None,
) -> Wires:
    """Layers [start, stop) without gradients: the new wires that later layers read.

    A recompute must see the same random state and buffers: keep both from before this
    call (``rng.capture_rng``, ``preserve.read_buffers`` of the layers' changing buffers).
    """
    if chain.skeleton.graph_kernels and chain.model.training:
        return _run_graph_forward(chain, micro, start, stop, wires, on_resume)
    with torch.no_grad(), autocast(chain.recipe, chain.device):
        return chain.forward(micro, start, stop, wires, on_resume=on_resume)


def _run_graph_forward(
    chain: Chain,
    micro: Micro,
    start: int,
    stop: int,
    wires: Mapping[Wire, Tensor],
    on_resume: Callable[[], None] | None,
) -> Wires:
    """The same with the kernels that torch takes for gradients, a layer's graph at a time."""
    given = dict(wires)
    with torch.enable_grad(), autocast(chain.recipe, chain.device):
        for layer in range(start, stop):
            inside = {w: t.detach().requires_grad_(chain.needs_grad(w)) for w, t in given.items()}
            made = chain.forward(micro, layer, layer + 1, inside, on_resume=on_resume)
            alive = chain.live_wires(layer + 1, micro)
            given = {w: made[w].detach() if w in made else given[w] for w in alive}
    return {wire: tensor for wire, tensor in given.items() if wire not in wires}


def run_backward(
    chain: Chain,
    micro: Micro,
    start: int,
    stop: int,
    wires: Mapping[Wire, Tensor],
    *,
    grads: Mapping[Wire, Tensor] | None = None,
    tied: Mapping[str, Tensor] | None = None,
    accumulate: int = 1,
    after_forward: Callable[[], None] | None = None,
) -> BackwardResult:
    """Layers [start, stop) again with gradients, then their backward.

    ``wires`` are those alive at ``start``, ``grads`` and ``tied`` the result of the next
    shard's backward; the last shard, ``stop == chain.num_layers``, has none and computes
    the loss. Gradients add to ``.grad`` of the parameters that the shard owns. Before a
    recompute the caller puts back the random state and the changing buffers of the
    shard's forward, and afterwards what they were before: the buffers not earlier than
    the end of this call. ``after_forward`` is told when the backward begins.
    """
    is_last = stop == chain.num_layers
    if not is_last and not grads and not tied:
        return BackwardResult()
    entries = {wire: _Boundary(tensor, chain.needs_grad(wire)) for wire, tensor in wires.items()}
    inside = {wire: entry.tensor for wire, entry in entries.items()}
    parts = TiedParts(chain, start, stop, tied or {})
    loss = None
    with torch.enable_grad(), autocast(chain.recipe, chain.device):
        parts.watch_casts()
        if is_last:
            loss = chain.loss(micro, start, inside)[0]
        else:
            made = chain.forward(micro, start, stop, inside)
            _require_known_gradients(chain, made)
            inside |= made
            made.clear()
    roots = list(parts.roots)
    if grads:
        read = chain.read_by(micro, start, stop)
        roots += _wire_roots(entries, inside, grads, read)
    inside.clear()
    if after_forward is not None:
        after_forward()
    with parts:
        if loss is not None:
            (loss / accumulate).backward()
        elif roots:
            torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])
    handed_on = {wire: entry.box[0] for wire, entry in entries.items() if entry.box}
    detached = None if loss is None else loss.detach()
    return BackwardResult(loss=detached, grads=handed_on, tied=parts.carried)


def _require_known_gradients(chain: Chain, made: Mapping[Wire, Tensor]) -> None:
    """Raise TrialError for a wire whose gradient no later shard would have computed."""
    for wire, tensor in made.items():
        if tensor.requires_grad and not chain.needs_grad(wire):
            maker = chain.layer_names[wire.layer]
            raise TrialError(
                f"layer {maker!r} makes a tensor with a gradient that had none in the pilot, so "
                "its gradient was not computed. Train this model unsharded."
            )


def _wire_roots(
    entries: Mapping[Wire, _Boundary],
    inside: Mapping[Wire, Tensor],
    grads: Mapping[Wire, Tensor],
    read: frozenset[Wire],
) -> list[Root]:
    """Where the gradients from later shards enter; those of untouched wires pass by."""
    roots = []
    for wire, grad in grads.items():
        if wire in entries and wire not in read:
            entries[wire].box.append(grad)
        elif inside[wire].requires_grad:
            roots.append((get_gradient_edge(inside[wire]), grad))
    return roots


class _Boundary:
    """A wire at a shard's entry, and the box its gradient falls into."""

    def __init__(self, tensor: Tensor, needs_grad: bool) -> None:
        self.box: list[Tensor] = []
        self.tensor = tensor
        if needs_grad:
            anchor = torch.zeros((), device=tensor.device, requires_grad=True)
            self.tensor = _Entry.apply(anchor, tensor, self.box)  # type: ignore[no-untyped-call]  # torch leaves it untyped


class _Entry(torch.autograd.Function):
    """The identity, whose backward puts the summed gradient into a box and ends there."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, box: list[Tensor]) -> Tensor:
        ctx.box = box
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.box.append(grad)
        return None, None, None
