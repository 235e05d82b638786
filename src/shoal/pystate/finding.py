"""Which code of a recipe's finds its trial's model without being given it, as in a global.

Alone that is the trial's own model, whole and where it trains. In an array it is another trial's;
in shards, in stages and in replicas by shards most of its weights are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.pystate import ambient
from shoal.recipes.bound import code_of
from shoal.recipes.libraries import is_library
from shoal.recipes.recipe import HP, Recipe, build_model
from shoal.recipes.spelled import code_met
from shoal.rng import capture_rng, restore_rng

HOST = torch.device("cpu")


def in_words(field: str, there: str) -> str:
    """What a field does that finds its model, what it finds ``there``, and what to do."""
    return (
        f"the code of Recipe({field}=...) finds the model without being given it, as in a global, "
        f"and {there}: have the model's forward return what that needs"
    )


def fields_that_find(recipe: Recipe, hp: HP, made: nn.Module | None = None) -> tuple[str, ...]:
    """The fields of a recipe whose code comes to the model of a trial with these ``hp``.

    Whoever makes a model may put it where code looks. So where code comes to modules or tensors,
    one is made: not if these are of ``made`` already, which was made of the recipe before. Globals
    and the host's random streams are as before then.
    """
    parts = _code_beside(recipe)
    if made is not None and (found := _holding(parts, made)):
        return found
    if not any(isinstance(one, nn.Module | Tensor) for met in parts.values() for one in met):
        return ()
    here, rng = ambient.here(), capture_rng(HOST)
    before = here.take()
    try:
        model = build_model(recipe, hp)
        return fields_holding(recipe, model)
    except (Exception, SystemExit):  # said elsewhere
        return ()
    finally:
        here.put(before)
        restore_rng(rng, HOST)


def fields_holding(recipe: Recipe, model: nn.Module) -> tuple[str, ...]:
    """The fields of a recipe whose code comes to this model."""
    return _holding(_code_beside(recipe), model)


def _holding(parts: Mapping[str, list[Any]], model: nn.Module) -> tuple[str, ...]:
    held = {id(one) for one in (*model.modules(), *model.parameters(), *model.buffers())}
    return tuple(name for name, met in parts.items() if not held.isdisjoint(map(id, met)))


def _code_beside(recipe: Recipe) -> dict[str, list[Any]]:
    """What the code of a recipe's functions comes to, by field; but of what makes models."""
    given = {n: code_of(v) for n, v in vars(recipe).items() if n != "model"}
    return {
        name: _met(value.values() if isinstance(value, Mapping) else [value])
        for name, value in given.items()
        if callable(value) or isinstance(value, Mapping)
    }


def _met(functions: Iterable[Any]) -> list[Any]:
    """With whatever methods of the user's classes: an engine calls these, and no name tells."""
    met = list(code_met(functions))
    kinds = [one for one in met if isinstance(one, type) and not is_library(one)]
    methods = [f for one in kinds for f in vars(one).values() if isinstance(f, FunctionType)]
    return met + list(code_met(methods))
