"""The optimizers of a recipe: what its function returned, or the default one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shoal.core.errors import SpecError
from shoal.recipes.modelaliases import refuse_kept, refuse_met
from shoal.recipes.recipe import HP, Recipe
from shoal.recipes.several import Models, as_one_optimizer, held_by_several, members_of


def build_optimizer(
    recipe: Recipe, named_parameters: Iterable[tuple[str, nn.Parameter]], hp: HP
) -> torch.optim.Optimizer:
    """The recipe's optimizer over all parameters, several as one; or the default one.

    Raises:
        SpecError: the factory returned something that is no optimizer, or one that keeps a
            parameter's memory by another tensor.
    """
    named = list(named_parameters)
    if recipe.optimizer is None:
        return _default_optimizer([parameter for _, parameter in named], hp)
    optimizer = as_one_optimizer(_made_optimizer(recipe.optimizer, named, hp))
    for member in members_of(optimizer):
        _finish(member)
        refuse_kept(member, dict(named), "optimizer", but=("param_groups", "state"))
    refuse_met(dict(named), vars(recipe))
    twice = () if recipe.step is not None else held_by_several(optimizer, dict(named))
    if twice:
        raise SpecError(
            f"Recipe(optimizer=...) gave {len(twice)} parameters to more than one optimizer, the "
            f"first {twice[0]!r}: each would step it. Give each parameter to one of them."
        )
    return optimizer


def _made_optimizer(
    function: Callable[[Any, HP], Any], named: list[tuple[str, nn.Parameter]], hp: HP
) -> Any:
    """What a recipe's function makes; an error of it says what it was given."""
    try:
        return function(named, hp)
    except SpecError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        pairs = f"a list of {len(named)} pairs of a name and a parameter"
        error.add_note(
            f"Recipe(optimizer=...) is called as (named_parameters, hp). It got {pairs}, and the "
            f"hyperparameters {dict(hp)}, in this order."
        )
        raise


def _finish(optimizer: torch.optim.Optimizer) -> None:
    """Give one whose ``__init__`` did not call torch's what torch needs of each.

    A copy of any optimizer has torch wrap ``step`` of its class, and that asks for hooks.
    """
    if not hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "defaults"):
        torch.optim.Optimizer.__setstate__(optimizer, {})


def build_optimizer_of(recipe: Recipe, model: nn.Module, hp: HP) -> torch.optim.Optimizer:
    """The recipe's optimizer of a model; by default one for each of several models."""
    if recipe.optimizer is not None or not isinstance(model, Models):
        return build_optimizer(recipe, model.named_parameters(), hp)
    found: dict[str, torch.optim.Optimizer] = {}
    held: set[int] = set()  # a module may be there under two names
    for name, module in model.named().items():
        own = [p for p in module.parameters() if id(p) not in held]
        held |= set(map(id, own))
        if any(parameter.requires_grad for parameter in own):
            found[name] = _default_optimizer(own, hp)
    if not found:
        raise SpecError("none of the modules has a parameter that requires a gradient.")
    return as_one_optimizer(found)


def _default_optimizer(parameters: list[nn.Parameter], hp: HP) -> torch.optim.Optimizer:
    if "lr" not in hp:
        known = ", ".join(map(repr, hp)) or "none"
        raise SpecError(
            f"unknown hyperparameter 'lr'; this trial has {known}. It is read by AdamW, "
            "which trains where there is no Recipe(optimizer=...). Add lr to the study's space, "
            "or give Recipe(optimizer=...), a function (named_parameters, hp) -> Optimizer."
        )
    rates = {"lr": hp["lr"], "weight_decay": hp.get("weight_decay", 0.01)}
    for name, rate in rates.items():
        if not isinstance(rate, int | float):
            raise SpecError(
                f"hp[{name!r}] is {rate!r}, {type(rate).__name__}, and AdamW, which trains where "
                "there is no Recipe(optimizer=...), takes a number. Give numbers in the space, or "
                "make the optimizer with Recipe(optimizer=...)."
            )
    fused = not any(parameter.is_complex() for parameter in parameters)  # torch has none of those
    return torch.optim.AdamW(parameters, **rates, fused=fused)  # type: ignore[arg-type]
