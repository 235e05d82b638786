"""Containers as JSON with their tensors beside it: what of a trial is no flat tensor.

Types survive the round trip: tuples, lists, mappings with any packable keys, counters,
NumPy scalars as Python's, tensors under a number, and whole random states. Nothing that is
read can become anything but one of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import StorageError, TrialError
from shoal.rng import RngState

PREFIX = "packed|"


class Packer:
    """Packs values; their tensors are added to ``tensors`` under names with ``prefix``."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str = PREFIX) -> None:
        self._tensors, self._prefix = tensors, prefix

    def pack(self, value: Any) -> Any:
        """``value`` as JSON-ready containers.

        Raises:
            TrialError: a type that has no rule.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Tensor):
            return {"tensor": self._keep(value)}
        if isinstance(value, RngState):
            return {"rng": self._rng(value)}
        if isinstance(value, tuple | list):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self.pack(item) for item in value]}
        if isinstance(value, Mapping):
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {kind: [[self.pack(k), self.pack(v)] for k, v in value.items()]}
        raise TrialError(
            f"a checkpoint has no rule for {type(value).__name__} in the state of the optimizer, "
            "schedule or data. Use numbers, strings, tensors and containers of them."
        )

    def _keep(self, tensor: Tensor) -> str:
        key = f"{self._prefix}{len(self._tensors)}"
        self._tensors[key] = tensor.detach().cpu().contiguous().clone()
        return key

    def _rng(self, state: RngState) -> dict[str, Any]:
        algorithm, keys, *rest = state.numpy
        version, internal, gauss = state.python
        return {
            "torch": self._keep(state.torch),
            "cuda": None if state.cuda is None else self._keep(state.cuda),
            "python": [version, self._keep(torch.tensor(internal)), gauss],
            "numpy": [algorithm, self._keep(torch.from_numpy(keys.astype(np.int64))), *rest],
        }


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``Packer.pack``.

    Raises:
        StorageError: it is nothing that was packed.
    """
    try:
        return _unpack(value, tensors)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise StorageError(
            f"the record of a checkpoint cannot be read: {type(error).__name__}: {error}. It was "
            "not written by shoal, or by another version. Use the generation before it."
        ) from error


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "rng":
        return _unpack_rng(content, tensors)
    if kind in ("tuple", "list"):
        items = [_unpack(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else items
    if kind not in ("dict", "counter"):
        raise ValueError(f"unknown kind {kind!r}")
    pairs = {_unpack(k, tensors): _unpack(v, tensors) for k, v in content}
    return Counter(pairs) if kind == "counter" else pairs


def _unpack_rng(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RngState:
    algorithm, keys, *rest = record["numpy"]
    version, internal, gauss = record["python"]
    return RngState(
        torch=tensors[record["torch"]],
        python=(version, tuple(tensors[internal].tolist()), gauss),
        numpy=(algorithm, tensors[keys].numpy().astype(np.uint32), *rest),
        cuda=None if record["cuda"] is None else tensors[record["cuda"]],
    )
