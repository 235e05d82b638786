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

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shoal.core.errors import TrialError
from shoal.partition.chain import Chain, Micro
from shoal.partition.halves import Half, backward_of_inputs, noting_hooks
from shoal.partition.savedset import SavedSet
from shoal.partition.ties import Root, TiedParts
from shoal.partition.wires import Wire, Wires, storage_key
from shoal.recipes.recipe import autocast

AfterForward = Callable[[Collection[int]], None]
"""Told the storages of what a forward made."""
NoteSaved = Callable[["Held"], None]


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
        made = chain.forward(micro, start, stop, wires, on_resume=on_resume)
    return _outside_parameters(chain, made)


def _outside_parameters(chain: Chain, made: Mapping[Wire, Tensor]) -> Wires:
    """Wires that later shards may read wherever this one's parameters are then.

    A position embedding, or a class token, is a view of one: it is copied. It may be of one that
    this shard did not use in the pilot.
    """
    if not any(map(_is_held_elsewhere, made.values())):
        return dict(made)
    with torch._C.DisableTorchFunction():
        owned = {_memory_of(parameter) for parameter in chain.model.parameters()} - {None}
    return {w: t.detach().clone() if _memory_of(t) in owned else t for w, t in made.items()}


def _is_held_elsewhere(tensor: Tensor) -> bool:
    """Whether another tensor has its memory, too, as a parameter may. Costs little to ask."""
    if tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    holders: int = torch._C._storage_Use_Count(storage._cdata)
    return holders > 2  # itself, and ``storage``


def _memory_of(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


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
    made = {wire: tensor for wire, tensor in given.items() if wire not in wires}
    return _outside_parameters(chain, made)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A shard's forward with gradients, which its backward has still to come to.

    ``made`` are its new wires, for later shards; ``edges`` is where the gradients of wires
    enter its graph, which refers to the shard's parameters where they are: they must stay there
    until the backward. Where it has a ``saved`` set that may wait on the host, and they may leave.
    """

    entries: dict[Wire, Boundary]
    edges: dict[Wire, GradientEdge]
    parts: TiedParts
    made: Wires
    saved: SavedSet | None = None


def run_held_forward(
    chain: Chain,
    micro: Micro,
    start: int,
    stop: int,
    wires: Mapping[Wire, Tensor],
    *,
    spills: bool = False,
) -> Held:
    """Layers [start, stop), not the last, with gradients; the backward is ``run_held_backward``.

    ``wires`` are those alive at ``start``. What it saves may wait on the host if it ``spills``.
    """
    entries = {wire: Boundary(tensor, chain.needs_grad(wire)) for wire, tensor in wires.items()}
    inside = {wire: entry.tensor for wire, entry in entries.items()}
    parts = TiedParts(chain, start, stop)
    saved = _saved_set(chain, start, stop, wires) if spills else None
    saving = saved.saving(chain.device) if saved else contextlib.nullcontext()
    with torch.enable_grad(), autocast(chain.recipe, chain.device), saving, noting_hooks():
        parts.watch_casts()
        made = chain.forward(micro, start, stop, inside)
        require_known_gradients(chain, made)
    edges = {w: get_gradient_edge(t) for w, t in (inside | made).items() if t.requires_grad}
    handed = {wire: tensor.detach() for wire, tensor in made.items()}
    if saved:
        handed = _outside_parameters(chain, handed)
        for entry in entries.values():
            entry.forget()  # its input may leave too
    return Held(entries=entries, edges=edges, parts=parts, made=handed, saved=saved)


def _saved_set(chain: Chain, start: int, stop: int, wires: Mapping[Wire, Tensor]) -> SavedSet:
    return SavedSet(chain.model, chain.parameters_in(start, stop), dict(wires))


def run_held_backward(
    chain: Chain,
    micro: Micro,
    start: int,
    stop: int,
    held: Held,
    *,
    grads: Mapping[Wire, Tensor] | None = None,
    tied: Mapping[str, Tensor] | None = None,
    wires: Mapping[Wire, Tensor] | None = None,
    on_begin: Callable[[], None] | None = None,
) -> BackwardResult:
    """The backward of a forward that was held, from ``grads`` and ``tied`` as ``run_backward``.

    ``wires`` are those alive at ``start``, where what it saved may have been on the host.
    ``on_begin`` is told when nothing but what the graph saved is left of the forward.
    """
    if not grads and not tied:
        return BackwardResult()
    roots = _arrive(chain, micro, (start, stop), held, grads or {}, tied or {})
    if on_begin is not None:
        on_begin()
    using = held.saved.using(wires or {}) if held.saved else contextlib.nullcontext()
    with held.parts, using, chain.backward_watched(start, stop):
        _backward(roots)
    return BackwardResult(grads=handed_on(held.entries), tied=held.parts.carried)


def run_held_inputs(
    chain: Chain,
    micro: Micro,
    start: int,
    stop: int,
    held: Held,
    *,
    grads: Mapping[Wire, Tensor],
    tied: Mapping[str, Tensor],
) -> tuple[BackwardResult, Half]:
    """As ``run_held_backward``, without the gradients of parameters: ``Half.run`` adds these."""
    if not grads and not tied:
        return BackwardResult(), Half()
    roots = _arrive(chain, micro, (start, stop), held, grads, tied)
    with chain.backward_watched(start, stop):
        return _halve(roots, held.entries, held.parts)


def run_last_inputs(
    chain: Chain, micro: Micro, start: int, wires: Mapping[Wire, Tensor], accumulate: int
) -> tuple[BackwardResult, Half]:
    """The last shard's forward, its loss, and the gradients of ``wires``."""
    loss, entries, parts = _forward_last(chain, micro, start, wires)
    parts.arrive({})
    scaled = loss / accumulate
    roots = [(get_gradient_edge(scaled), torch.ones_like(scaled))]
    with chain.backward_watched(start, chain.num_layers):
        result, half = _halve(roots, entries, parts)
    return replace(result, loss=loss.detach()), half


def _arrive(
    chain: Chain,
    micro: Micro,
    span: tuple[int, int],
    held: Held,
    grads: Mapping[Wire, Tensor],
    tied: Mapping[str, Tensor],
) -> list[Root]:
    """Where what later shards hand back enters a held forward's graph."""
    held.parts.arrive(tied)
    roots = list(held.parts.roots)
    if grads:
        read = chain.read_by(micro, *span)
        roots += wire_roots(held.entries, held.edges, grads, read)
    held.made.clear()
    return roots


def _halve(
    roots: list[Root], entries: Mapping[Wire, Boundary], parts: TiedParts
) -> tuple[BackwardResult, Half]:
    """Half of a backward now; all of it where a tied parameter's gradient has to travel."""
    anchors = [entry.anchor for entry in entries.values() if entry.anchor is not None]
    half = Half()
    with parts:
        if parts.is_idle and anchors:
            half = backward_of_inputs(roots, anchors)
        else:
            _backward(roots)
    return BackwardResult(grads=handed_on(entries), tied=parts.carried), half


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
    after_forward: AfterForward | None = None,
    note_saved: NoteSaved | None = None,
) -> BackwardResult:
    """Layers [start, stop) again with gradients, then their backward.

    ``wires`` are those alive at ``start``, ``grads`` and ``tied`` the result of the next
    shard's backward; the last shard, ``stop == chain.num_layers``, has none and computes
    the loss. Gradients add to ``.grad`` of the parameters that the shard owns. Before a
    recompute the caller puts back the random state and the changing buffers of the
    shard's forward, and afterwards what they were before: the buffers not earlier than
    the end of this call. ``after_forward`` is told when the backward begins, with the
    storages of the wires that the forward made, which only what the graph saved still holds;
    ``note_saved`` is given that forward, of which all may be elsewhere meanwhile.
    """
    if stop == chain.num_layers:
        return _run_last(chain, micro, start, wires, accumulate, after_forward)
    if not grads and not tied:
        return BackwardResult()
    spills = note_saved is not None
    held = run_held_forward(chain, micro, start, stop, wires, spills=spills)
    made = {storage_key(tensor) for tensor in held.made.values()}
    if note_saved is not None:
        note_saved(held)
    held.made.clear()
    begin = functools.partial(after_forward, made) if after_forward is not None else None
    return run_held_backward(
        chain, micro, start, stop, held, grads=grads, tied=tied, wires=wires, on_begin=begin
    )


def _run_last(
    chain: Chain,
    micro: Micro,
    start: int,
    wires: Mapping[Wire, Tensor],
    accumulate: int,
    after_forward: AfterForward | None,
) -> BackwardResult:
    """The forward of the last shard, its loss, and the backward."""
    loss, entries, parts = _forward_last(chain, micro, start, wires)
    if after_forward is not None:
        after_forward(set())
    parts.arrive({})
    with parts, chain.backward_watched(start, chain.num_layers):
        (loss / accumulate).backward()
    return BackwardResult(loss=loss.detach(), grads=handed_on(entries), tied=parts.carried)


def _forward_last(
    chain: Chain, micro: Micro, start: int, wires: Mapping[Wire, Tensor]
) -> tuple[Tensor, dict[Wire, Boundary], TiedParts]:
    entries = {wire: Boundary(tensor, chain.needs_grad(wire)) for wire, tensor in wires.items()}
    inside = {wire: entry.tensor for wire, entry in entries.items()}
    parts = TiedParts(chain, start, chain.num_layers)
    with torch.enable_grad(), autocast(chain.recipe, chain.device), noting_hooks():
        parts.watch_casts()
        loss = chain.loss(micro, start, inside)[0]
    return loss, entries, parts


def _backward(roots: list[Root]) -> None:
    if roots:
        torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])


def handed_on(entries: Mapping[Wire, Boundary]) -> Wires:
    """The gradients that fell into the boxes at a shard's start.

    The boxes are empty then: between the halves of a backward its graph still has them.
    """
    found = {wire: entry.box[0] for wire, entry in entries.items() if entry.box}
    for entry in entries.values():
        entry.box.clear()
    return found


def require_known_gradients(chain: Chain, made: Mapping[Wire, Tensor]) -> None:
    """Raise TrialError for a wire whose gradient no later shard would have computed."""
    for wire, tensor in made.items():
        if tensor.requires_grad and not chain.needs_grad(wire):
            maker = chain.layer_names[wire.layer]
            raise TrialError(
                f"layer {maker!r} makes a tensor with a gradient that had none in the pilot, so "
                "its gradient was not computed. Train this model unsharded."
            )


def wire_roots(
    entries: Mapping[Wire, Boundary],
    edges: Mapping[Wire, GradientEdge],
    grads: Mapping[Wire, Tensor],
    read: frozenset[Wire],
) -> list[Root]:
    """Where the gradients from later shards enter; those of untouched wires pass by."""
    roots = []
    for wire, grad in grads.items():
        if wire in entries and wire not in read:
            entries[wire].box.append(grad)
        elif wire in edges:
            roots.append((edges[wire], grad))
    return roots


class Boundary:
    """A wire at a shard's entry, and the box its gradient falls into."""

    def __init__(self, tensor: Tensor, needs_grad: bool) -> None:
        self.box: list[Tensor] = []
        self.tensor = tensor
        self.anchor: Tensor | None = None
        if needs_grad:
            self.anchor = torch.zeros((), device=tensor.device, requires_grad=True)
            self.tensor = _Entry.apply(self.anchor, tensor, self.box)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def forget(self) -> None:
        """Let go of the tensor; where its gradient falls is known."""
        self.tensor = torch.empty(0)


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
