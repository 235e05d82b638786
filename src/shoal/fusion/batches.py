"""The batches of all slots as one batch whose tensors are stacked."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.fusion.blend import blend


def stacked_leaves(batches: Sequence[Any]) -> list[Tensor]:
    """The tensors of ``combined``, stacked, in its order."""
    found: list[Tensor] = []

    def keep(stacked: Tensor) -> Tensor:
        found.append(stacked)
        return stacked

    combined(batches, keep)
    return found


def holds_floats(batch: Any) -> bool:
    """Whether a batch has floats beside its tensors, which may be others in the next one."""
    if isinstance(batch, Mapping):
        return any(map(holds_floats, batch.values()))
    if isinstance(batch, tuple | list):
        return any(map(holds_floats, batch))
    return isinstance(batch, float)


def combined(
    batches: Sequence[Any], join: Callable[[Tensor], Tensor], active: Sequence[bool] = ()
) -> Any:
    """A batch of the first one's structure; its tensors are ``join`` of the stacked ones.

    The batches are of one kind (``signature.kind_of``). Where tensors may have a gradient,
    ``active`` says whose: what a neighbour makes of a slot's tensor is nothing to that slot.
    """

    def leaf(tensors: Sequence[Tensor]) -> Tensor:
        pairs = zip(tensors, active or [True] * len(tensors), strict=True)
        return join(torch.stack([t if is_active else t.detach() for t, is_active in pairs]))

    return _built(batches, leaf)


def rebuilt(batch: Any, leaves: Iterator[Tensor]) -> Any:
    """A batch of this one's structure, with the next of ``leaves`` for each of its tensors."""
    return _built([batch], lambda _: next(leaves))


def leaves_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in the order in which ``rebuilt`` puts others there."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [leaf for value in batch.values() for leaf in leaves_of(value)]
    if isinstance(batch, tuple | list):
        return [leaf for value in batch for leaf in leaves_of(value)]
    return []


def _built(batches: Sequence[Any], leaf: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    first = batches[0]
    if isinstance(first, Tensor):
        return leaf(batches)
    if isinstance(first, Mapping):
        values = {key: _built([b[key] for b in batches], leaf) for key in first}
        return values if type(first) is dict else type(first)(values)  # type: ignore[call-arg]
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_built(items, leaf) for items in zip(*batches, strict=True)))
    if isinstance(first, tuple | list):
        return type(first)(_built(items, leaf) for items in zip(*batches, strict=True))
    return blend(batches, "a value in the batch")


def layout_of(batch: Any) -> Hashable:
    """What batches need to have in common to be stacked: structure, shapes, types, values."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, Mapping):
        return type(batch), tuple((key, layout_of(value)) for key, value in batch.items())
    if isinstance(batch, tuple | list):
        return type(batch), tuple(layout_of(value) for value in batch)
    return type(batch), None if isinstance(batch, float) else repr(batch)


def elements_of(layout: Any) -> int:
    """Of all tensors of a batch, from its layout."""
    if isinstance(layout, torch.Size):
        return layout.numel()
    return sum(map(elements_of, layout)) if isinstance(layout, tuple) else 0
