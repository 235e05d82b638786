"""The batches of all slots as one batch whose tensors are stacked."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.fusion.blend import blend


def combined(batches: Sequence[Any], join: Callable[[Tensor], Tensor]) -> Any:
    """A batch of the first one's structure; its tensors are ``join`` of the stacked ones.

    The batches are of one kind (``signature.kind_of``).
    """
    first = batches[0]
    if isinstance(first, Tensor):
        return join(torch.stack(list(batches)))
    if isinstance(first, Mapping):
        values = {key: combined([b[key] for b in batches], join) for key in first}
        return values if type(first) is dict else type(first)(values)  # type: ignore[call-arg]
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(combined(items, join) for items in zip(*batches, strict=True)))
    if isinstance(first, tuple | list):
        return type(first)(combined(items, join) for items in zip(*batches, strict=True))
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
