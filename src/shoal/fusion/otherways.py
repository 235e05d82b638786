"""A forward as it may go with a later batch: other values of Python, other answers of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from shoal.fusion.batches import changed_by
from shoal.fusion.mode import TRUTHS
from shoal.recipe import Batch, Fed, Recipe, model_inputs

MOST_ANSWERS = 64
"""After so many other answers a loop that waits for one has the true ones."""


def with_other_values(recipe: Recipe, batch: Batch) -> Fed | None:
    """The batch with other values of Python among the model's inputs; None without any."""

    def turned(value: Any) -> Any:
        if isinstance(value, bool):
            return not value
        return value + 1 if isinstance(value, int | float) else value

    args, kwargs = model_inputs(recipe, changed_by(torch.clone, batch))
    if not any(isinstance(leaf, int | float) for leaf in tree_leaves((args, kwargs))):
        return None
    inner = batch.batch if type(batch) is Fed else batch
    return Fed(tree_map(turned, args), tree_map(turned, kwargs), inner)


class OtherAnswers(TorchFunctionMode):
    """Where code asks a tensor whether it is true it is told the opposite."""

    def __init__(self) -> None:
        super().__init__()
        self._left = MOST_ANSWERS

    @property
    def has_asked(self) -> bool:
        """Whether code did."""
        return self._left < MOST_ANSWERS

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The operation itself, but for an answer."""
        result = func(*args, **(kwargs or {}))
        is_answer = func in TRUTHS or (func is Tensor.item and isinstance(result, bool))
        if not is_answer or not self._left:
            return result
        self._left -= 1
        return not result
