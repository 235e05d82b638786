"""What trials are compared by before an array is trusted: copies, wide numbers, closeness."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.fusion.declined import Declined
from shoal.fusion.member import Member


def copies(members: Sequence[Member]) -> list[Member]:
    """Independent copies; recipes are shared."""
    shared = {id(member.recipe): member.recipe for member in members}
    try:
        return [copy.deepcopy(member, dict(shared)) for member in members]
    except Exception as error:
        raise Declined(f"the model cannot be copied: {error}") from error


def as_double(batch: Any) -> Any:
    """A batch with its floating-point tensors in float64."""
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        values = {key: as_double(value) for key, value in batch.items()}
        return values if type(batch) is dict else type(batch)(values)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(as_double(value) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(as_double(value) for value in batch)
    return batch


def close(alone: Tensor, found: Tensor, limit: float, scale: float) -> bool:
    """Equal where not numbers, and else up to ``limit`` times the largest, at least ``scale``."""
    if alone.shape != found.shape or alone.dtype != found.dtype:
        return False
    if not alone.is_floating_point():
        return torch.equal(alone, found)
    finite = alone.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return False
    one, other = alone[finite].double(), found[finite].double()
    if not one.numel():
        return True
    largest = max(float(one.abs().max()), scale)
    return float((one - other).abs().max()) <= limit * largest


def numpy_stream() -> str:
    """The state of NumPy's global stream."""
    state: Any = np.random.get_state()
    return f"{state[1].tobytes()!r} {state[2:]}"
