"""The batches of all slots as one batch whose tensors are stacked."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.fusion.rows.blend import blend
from shoal.recipes.recipe import to_device

ALIGNED_BYTES = 256
"""Rows of so many, or a multiple, begin where a tensor alone might. Kernels are chosen by that,
and a slot whose batch is of another layout is to come to the bits that it has alone."""


def stacked_leaves(batches: Sequence[Any]) -> list[Tensor]:
    """The tensors of ``combined``, stacked, in its order."""
    found: list[Tensor] = []

    def keep(stacked: Tensor) -> Tensor:
        found.append(stacked)
        return stacked

    combined(batches, keep)
    return found


def moved_together(batches: Sequence[Any], device: torch.device) -> list[Any]:
    """Every batch on a GPU, as ``to_device`` has it; None stays None.

    Those of one layout travel as one copy for each of their tensors, and become its rows: many
    small copies cost a GPU's host more than what they feed. Nothing else is on these rows' memory.
    """
    found: list[Any] = list(batches)
    alike: dict[Hashable, list[int]] = {}
    for slot, batch in enumerate(batches):
        alike.setdefault(layout_of(batch) if _stacks_on_host(batch) else slot, []).append(slot)
    for slots in alike.values():
        if len(slots) == 1:
            found[slots[0]] = to_device(batches[slots[0]], device)
            continue
        columns = zip(*(leaves_of(batches[slot]) for slot in slots), strict=True)
        moved = [_rows_on(device, tensors) for tensors in columns]
        for slot, *rows in zip(slots, *moved, strict=True):
            found[slot] = rebuilt(batches[slot], iter(rows))
    return found


def _rows_on(device: torch.device, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Alike tensors in host memory, on a GPU behind its work, which is not waited for."""
    first = tensors[0]
    together = torch.empty((len(tensors), *first.shape), dtype=first.dtype, pin_memory=True)
    torch.stack(list(tensors), out=together)  # torch keeps it until the copy is through
    return together.to(device, non_blocking=True).unbind(0)


def _stacks_on_host(batch: Any) -> bool:
    """Whether it is of plain tensors in host memory, beside what is the same anywhere."""
    if isinstance(batch, Tensor):
        plain = type(batch) is Tensor and batch.device.type == "cpu" and not batch.requires_grad
        lies_plainly = batch.layout is torch.strided and batch.is_contiguous()
        return plain and lies_plainly and batch.nbytes % ALIGNED_BYTES == 0
    if isinstance(batch, tuple | list):
        return all(map(_stacks_on_host, batch))
    if isinstance(batch, Mapping):
        return all(map(_stacks_on_host, batch.values()))
    return batch is not None and isinstance(batch, bool | int | float | str)


def holds_floats(batch: Any) -> bool:
    """Whether a batch has floats beside its tensors, which may be others in the next one."""
    if isinstance(batch, tuple | list):
        return any(map(holds_floats, batch))
    if isinstance(batch, Mapping):
        return any(map(holds_floats, batch.values()))
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


def changed_by(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """A batch of this one's structure, whose tensors are ``change`` of its own."""
    return rebuilt(batch, map(change, leaves_of(batch)))


def leaves_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in the order in which ``rebuilt`` puts others there."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, tuple | list):
        return [leaf for value in batch for leaf in leaves_of(value)]
    if isinstance(batch, Mapping):
        return [leaf for value in batch.values() for leaf in leaves_of(value)]
    return []


def _built(batches: Sequence[Any], leaf: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    first = batches[0]
    if isinstance(first, Tensor):
        return leaf(batches)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_built(items, leaf) for items in zip(*batches, strict=True)))
    if isinstance(first, tuple | list):
        return type(first)(_built(items, leaf) for items in zip(*batches, strict=True))
    if isinstance(first, Mapping):
        values = {key: _built([b[key] for b in batches], leaf) for key in first}
        return values if type(first) is dict else type(first)(values)  # type: ignore[call-arg]
    return blend(batches, "a value in the batch")


def layout_of(batch: Any) -> Hashable:
    """What batches need to have in common to be stacked: structure, shapes, types, values."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, tuple | list):
        return type(batch), tuple(layout_of(value) for value in batch)
    if isinstance(batch, Mapping):
        return type(batch), tuple((key, layout_of(value)) for key, value in batch.items())
    return type(batch), None if isinstance(batch, float) else repr(batch)


def elements_of(layout: Any) -> int:
    """Of all tensors of a batch, from its layout."""
    if isinstance(layout, torch.Size):
        return layout.numel()
    return sum(map(elements_of, layout)) if isinstance(layout, tuple) else 0
