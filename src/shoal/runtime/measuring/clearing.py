"""Gradients that a trial cannot have as a loop has them: refused before it trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.core.errors import SpecError
from shoal.recipes.recipe import Recipe
from shoal.recipes.several import members_of
from shoal.runtime.measuring.clipping import refuse_forgotten, refuse_sparse_norm

NUMBERS = (int, float, str, type(None))
"""What is noticed where ``zero_grad`` changes it: a count, a flag."""


def refuse_gradients(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Of a recipe that is bound to its trial.

    Raises:
        SpecError: it clips by a norm that means nothing, or clears gradients in its own way.
    """
    refuse_forgotten(recipe, model, optimizer)
    refuse_sparse_norm(recipe, model)
    refuse_own_clearing(recipe, optimizer)


def refuse_own_clearing(recipe: Recipe, optimizer: torch.optim.Optimizer) -> None:
    """A trial's gradients are None before each backward, and nobody asks its optimizer for that.

    A step of one's own does, itself.

    Raises:
        SpecError: a ``zero_grad`` of the user's leaves gradients, or counts.
    """
    if recipe.step is not None:
        return
    for member in members_of(optimizer):
        if getattr(member.zero_grad, "__func__", None) is torch.optim.Optimizer.zero_grad:
            continue
        if does := _does(member):
            raise SpecError(
                f"the zero_grad of the optimizer {type(member).__name__} {does}, and a trial does "
                "not call it: gradients are None before each backward. Do that in step(), and "
                "keep what is to outlast a step in state[parameter]."
            )


def _does(optimizer: torch.optim.Optimizer) -> str:
    """What else it does than clear the gradients; empty if nothing."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    before = _numbers(optimizer)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.zero_grad(set_to_none=True)
        if any(p.grad is not None and bool(p.grad.any()) for p in params):
            return "leaves gradients"
        now = _numbers(optimizer)
    finally:
        for parameter in params:
            parameter.grad = None
    changed = [name for name, value in now.items() if before.get(name, params) != value]
    return f"changes {changed[0]!r}" if changed else ""


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = {
        f"{name} of group {number}": value
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
    }
    found = vars(optimizer) | options
    return {name: value for name, value in found.items() if isinstance(value, NUMBERS)}
