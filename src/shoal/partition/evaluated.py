"""Which outputs of blocks have another floating type in evaluation than in training.

Under autocast on a CPU torch computes ``nn.TransformerEncoderLayer`` by one kernel in evaluation,
and leaves bfloat16 where training leaves float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.partition.glue import Block, ReplacedCalls, own_call
from shoal.partition.preserve import evaluating, preserved
from shoal.partition.template import Shape, Template, flatten
from shoal.recipes.recipe import Batch, Recipe, autocast, loss_and_output


def with_retyped(
    model: nn.Module, recipe: Recipe, batch: Batch, device: torch.device, blocks: tuple[Block, ...]
) -> tuple[Block, ...]:
    """``blocks`` with what one evaluation shows; as they are where there is none.

    No mode that sees functions is entered: torch takes other kernels where one is. ``batch`` may
    be changed; the model is afterwards as before.
    """
    found: list[tuple[nn.Module, list[Any]]] = []
    calls = {block.module: _noting(block.module, found) for block in blocks}
    with preserved(model, device), evaluating(model), ReplacedCalls(calls):
        try:
            with torch.no_grad(), autocast(recipe, device):
                loss_and_output(recipe, model, batch)
        except Exception:  # a model that has no loss in evaluation mode is not validated
            return blocks
    if [module for module, _ in found] != [block.module for block in blocks]:
        return blocks
    return tuple(
        replace(block, retyped=frozenset(_retyped(block.output, types)))
        for block, (_, types) in zip(blocks, found, strict=True)
    )


def may_stand_for(found: torch.dtype, told: torch.dtype) -> bool:
    """May an output be of the type ``found``? What was planned for another has room for it."""
    both = found.is_floating_point and told.is_floating_point
    return found == told or (both and found.itemsize <= told.itemsize)


def _noting(module: nn.Module, found: list[tuple[nn.Module, list[Any]]]) -> Callable[..., Any]:
    """The module's own call, which writes down the types that it returns."""
    call = own_call(module)

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        leaves = flatten(output)[0]
        found.append((module, [t.dtype if isinstance(t, Tensor) else None for t in leaves]))
        return output

    return noted


def _retyped(told: Template, types: list[Any]) -> Iterator[int]:
    """What hooks keep comes behind what is returned, and is not looked at."""
    if len(types) > len(told.leaves):
        return
    for index, (leaf, found) in enumerate(zip(told.leaves, types, strict=False)):
        if not isinstance(leaf, Shape) or found in (None, leaf.dtype):
            continue
        if may_stand_for(found, leaf.dtype):
            yield index
