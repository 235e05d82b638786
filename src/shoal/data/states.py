"""Copies of what a source says of its own state, as a checkpoint can keep them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from shoal.core.errors import TrialError


def is_stateful(source: object) -> bool:
    """Whether a source says where it is and can be put there: ``state_dict`` and its pair."""
    return all(callable(getattr(source, n, None)) for n in ("state_dict", "load_state_dict"))


def portable(value: Any, where: str = "state_dict()") -> Any:
    """A copy of ``value`` that the source cannot change any more, tensors on the CPU.

    Raises:
        TrialError: something in it is no number, string, tensor or container of them.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, tuple | list):
        items = [portable(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        kind = Counter if isinstance(value, Counter) else dict
        return kind({portable(k, where): portable(v, f"{where}[{k!r}]") for k, v in value.items()})
    raise TrialError(
        f"the training data's {where} is {type(value).__name__}, which no checkpoint can keep. "
        "Give numbers, strings, tensors and containers of them: torch.from_numpy(array), for "
        "one. Without state_dict() the data is read again from the first batch instead."
    )
