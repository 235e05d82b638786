"""Where the tensors of a shard lie while it is at one place: in a device's slot, on the host."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from shoal.core.spec import ALIGNMENT
from shoal.core.units import round_up
from shoal.memory.layout import ShardLayout, TrialLayout
from shoal.memory.split import SplitWeight, split_weights
from shoal.memory.store import Region, field_view, state_views, view, views

States = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Placed:
    """One shard's tensors at one place: a slot of the device, or the host store.

    On the host ``params`` are whole, and ``param_bytes`` what is loaded: where weights travel
    as bfloat16, their ``copies``, which ``renew_copies`` makes equal to them again. Of a shard
    whose ``head`` stays on the device, that is the first bytes of its parameters, or of its
    state, and ``param_bytes`` or ``state_bytes`` the rest. Weights that are ``split`` there are
    no ``params``.
    """

    params: Mapping[str, Tensor]
    states: States
    grads: Mapping[str, Tensor]
    param_bytes: Tensor  # flat: the owned parameters
    state_bytes: Tensor
    borrowed: Mapping[str, Tensor]
    copies: Mapping[str, Tensor] = field(default_factory=dict)
    head: Tensor | None = None
    head_of_state: bool = False
    split: Mapping[str, SplitWeight] = field(default_factory=dict)

    def renew_copies(self, names: Collection[str] | None = None) -> None:
        """Cast the parameters, or those of these names, into the copies that are loaded."""
        for name, copy in self.copies.items():
            if names is None or name in names:
                copy.copy_(self.params[name])

    def joined(self, names: Iterable[str], memory: Tensor) -> dict[str, Tensor]:
        """The float32 of the split weights among these names, one after another in ``memory``."""
        found, offset = {}, 0
        for name in names:
            if (weight := self.split.get(name)) is not None:
                weight.join(place := view(memory, offset, weight.spec))
                found[name] = place
                offset += round_up(weight.spec.num_bytes, ALIGNMENT)
        return found


def place_in_slot(
    slot: Tensor, layout: ShardLayout, parts: Sequence[str], kept: Placed | None = None
) -> Placed:
    """Views of a shard in a device slot that has room for ``parts`` ("state", "grad").

    Where its parameters are ``kept`` elsewhere on the device, the slot has none of them; where
    their head is, the rest.
    """
    if kept is not None and kept.params:
        return _beside(kept, slot, layout, parts)
    head = None if kept is None else kept.head
    owned = layout.loaded.num_bytes - (0 if head is None else head.numel())
    borrowed, offset = {}, owned
    for _, entry in layout.borrowed:
        borrowed[entry.spec.name] = view(slot, offset, entry.spec)
        offset += round_up(entry.spec.num_bytes, ALIGNMENT)
    state_at = offset
    state_size = layout.state.num_bytes if "state" in parts else 0
    grad_at = state_at + state_size
    grad_size = layout.grad.num_bytes if "grad" in parts else 0
    return Placed(
        params=views(slot, layout.loaded, head=head) | borrowed,
        states=state_views(slot, layout.state, state_at) if state_size else {},
        grads=views(slot, layout.grad, grad_at) if grad_size else {},
        param_bytes=slot[:owned],
        state_bytes=slot[state_at : state_at + state_size],
        borrowed=borrowed,
        head=head,
    )


def place_what_stays(spot: Tensor, layout: ShardLayout, parts: Sequence[str]) -> Placed:
    """Views of what of a shard stays on the device: ``parts`` of "param", "state", "head"."""
    if "head" not in parts:
        return place_in_slot(spot, layout, parts)
    if "param" not in parts:
        nothing = spot[:0]
        return Placed({}, {}, {}, nothing, nothing, {}, head=spot)
    placed = place_in_slot(spot, layout, ())
    return replace(placed, head=spot[layout.loaded.num_bytes :], head_of_state=True)


def without_head(host: Placed, num_bytes: int, *, of_state: bool) -> Placed:
    """The host's tensors of a shard of which the rest travels."""
    if of_state:
        head, rest = host.state_bytes[:num_bytes], host.state_bytes[num_bytes:]
        return replace(host, state_bytes=rest, head=head, head_of_state=True)
    head, rest = host.param_bytes[:num_bytes], host.param_bytes[num_bytes:]
    return replace(host, param_bytes=rest, head=head)


def _beside(kept: Placed, slot: Tensor, layout: ShardLayout, parts: Sequence[str]) -> Placed:
    """State and gradients in a slot, parameters where they stay."""
    head = kept.head if kept.head_of_state else None
    in_head = 0 if head is None else head.numel()
    state_size = layout.state.num_bytes - in_head if "state" in parts else 0
    return replace(
        kept,
        states=state_views(slot, layout.state, head=head) if "state" in parts else {},
        grads=views(slot, layout.grad, state_size) if "grad" in parts else {},
        state_bytes=slot[:state_size],
    )


def place_on_host(region: Region, layout: TrialLayout, shard: int) -> Placed:
    """Views of a shard in the host store; borrowed parameters are their owner's."""
    own = layout.shards[shard]
    borrowed = {
        entry.spec.name: _lent(region, layout.shards[owner], entry.spec.name)
        for owner, entry in own.borrowed
    }
    return Placed(
        params=views(region.bytes, own.whole, own.whole_at) | borrowed,
        states=state_views(region.bytes, own.state, own.state_at),
        grads=views(region.bytes, own.grad, own.grad_at),
        param_bytes=region.segment(own.loaded_at, own.loaded.num_bytes),
        state_bytes=region.segment(own.state_at, own.state.num_bytes),
        borrowed=borrowed,
        copies=views(region.bytes, own.copy, own.copy_at) if own.copy and not own.low else {},
        split=split_weights(region.bytes, own),
    )


def _lent(region: Region, owner: ShardLayout, name: str) -> Tensor:
    """A parameter that another shard owns, which is whole there: nothing tied is split."""
    field_ = next(f for f in owner.whole.fields if f.spec.name == name)
    return field_view(region.bytes, owner.whole_at, field_)
