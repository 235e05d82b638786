"""Gradients whose norm means nothing: refused before a trial trains."""

from __future__ import annotations

import torch
from torch import nn

from shoal.core.errors import SpecError
from shoal.core.units import counted
from shoal.recipes.bound import clip_limit
from shoal.recipes.recipe import Recipe
from shoal.runtime.measuring.counting import sparse_gradient_of


def refuse_forgotten(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Of a recipe that is bound to its trial.

    Raises:
        SpecError: it clips by a norm of gradients that nobody clears.
    """
    if clip_limit(recipe) is None:
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    forgotten = [
        name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held
    ]
    if forgotten:
        raise SpecError(
            f"the optimizer does not hold {counted(len(forgotten), 'trainable parameter')}, "
            "the first "
            f"{forgotten[0]!r}, and clip_grad_norm is set: their gradients are never cleared, "
            "and would count in the norm, larger at every step. Freeze them with "
            "requires_grad_(False), or give them to the optimizer."
        )


def refuse_sparse_norm(recipe: Recipe, model: nn.Module) -> None:
    """Torch takes the norm of no gradient that is sparse, be it there or made by code later.

    Raises:
        SpecError: it clips by that norm.
    """
    name = sparse_gradient_of(model)
    if name and clip_limit(recipe) is not None:
        raise SpecError(
            f"clip_grad_norm takes the norm of all gradients, and that of {name!r} is sparse, "
            "of which torch takes none. Leave it out, or have the embedding's sparse=False."
        )
