"""Metrics of a whole validation set, which no mean over its batches is: AUC, F1, R squared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.errors import SpecError
from shoal.core.values import plain


@dataclass(frozen=True)
class WholeSet:
    """A metric that is computed once an evaluation, of something from each of its batches.

        metrics={"auc": shoal.WholeSet(
            lambda output, batch: (output[:, 1], batch[1]),
            lambda scores, labels: roc_auc_score(labels, scores),
        )}

    Args:
        collect: ``(output, batch) -> what is needed of a batch``: a tensor or array, a number, or
            a tuple or dict of these. With a parameter called ``hp``, as in ``Recipe(loss=...)``.
        compute: called with what was collected, of all batches in their order: tensors and arrays
            joined in their first dimension, on the CPU; numbers as a tensor of one for each batch;
            a tuple as arguments, a dict as keyword arguments. Returns a number. It may take ``hp``
            too. What it draws at random is drawn from seed 0, wherever the trial trains.

    What is collected of a validation set is in the host's memory until it is over: take what the
    metric needs. (torchmetrics calls these two update and compute.)

    Raises:
        SpecError: one of them is no function.
    """

    collect: Callable[..., Any]
    compute: Callable[..., Any]

    def __post_init__(self) -> None:
        for name in ("collect", "compute"):
            if not callable(value := getattr(self, name)):
                raise SpecError(
                    f"shoal.WholeSet({name}=...) is a function, got {type(value).__name__}: "
                    f"{value!r}. It takes two: (output, batch) -> what is needed of a batch, and "
                    "what was collected -> a number."
                )

    def __call__(self, output: Any, batch: Any) -> Part:
        """What is needed of a batch."""
        return Part(pytree.tree_map(_kept, self.collect(output, batch)))

    def of(self, parts: Sequence[Part], name: str) -> Any:
        """What ``compute`` returns for the parts of all batches, of the metric called so."""
        flat = [pytree.tree_flatten(part.value) for part in parts]
        shapes = {str(tree) for _, tree in flat}
        if len(shapes) > 1:
            raise SpecError(
                f"{self._called(name)} collected {len(shapes)} kinds of things from the "
                f"validation batches: {' and '.join(sorted(shapes))}. Return the same from each."
            )
        rows = zip(*(leaves for leaves, _ in flat), strict=True)
        joined = pytree.tree_unflatten([self._joined(row, name) for row in rows], flat[0][1])
        if isinstance(joined, Mapping):
            return self.compute(**joined)
        return self.compute(*joined) if isinstance(joined, tuple) else self.compute(joined)

    def _joined(self, of: Sequence[Any], name: str) -> Any:
        """What one place of the parts has, of all batches."""
        try:
            if all(isinstance(one, np.ndarray) and one.ndim for one in of):
                return np.concatenate(of)
            if all(isinstance(one, Tensor) and one.dim() for one in of):
                return torch.cat(list(of))
            return torch.stack([_as_tensor(one) for one in of])
        except (RuntimeError, TypeError, ValueError) as error:
            kinds = ", ".join(dict.fromkeys(map(_kind, of)))
            raise SpecError(
                f"{self._called(name)} collected {kinds} from the validation batches, which "
                f"cannot be joined: {error}. Return tensors with a row for each example, or "
                "numbers."
            ) from error

    def _called(self, name: str) -> str:
        return f"Recipe(metrics[{name!r}]=shoal.WholeSet(...))"


@dataclass(frozen=True, slots=True)
class Part:
    """What was collected of one batch: containers of tensors on the CPU, arrays and numbers."""

    value: Any


def _kept(value: Any) -> Any:
    """A leaf on the CPU that nobody writes to any more."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return value.copy() if isinstance(value, np.ndarray) else plain(value)


def _as_tensor(value: Any) -> Tensor:
    """A number with all its digits."""
    return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
