"""Code that finds its model without being given it, where a part of the weights is elsewhere.

``shoal.pystate.finding`` looks for it. A trial that is whole on its device has its model for
itself, so nothing of this concerns one.
"""

from __future__ import annotations

from torch import nn

from shoal.pystate.finding import fields_that_find, in_words
from shoal.recipes.recipe import HP, Recipe

COMPARED = frozenset(("loss", "inputs", "optimizer"))
"""A shard has what a loss and inputs read (``shoal.partition.owners``), or the trial fails; how an
optimizer steps shards is compared."""


def away_from(recipe: Recipe, hp: HP, model: nn.Module) -> str:
    """In words, why no model of the recipe's is cut: other code finds it; empty if none does."""
    found = [name for name in fields_that_find(recipe, hp, model) if name not in COMPARED]
    there = "in shards most weights are elsewhere when it runs"
    return in_words(found[0], there) if found else ""


def with_a_share_of(recipe: Recipe, hp: HP, model: nn.Module) -> str:
    """In words, why no replica of it has rows of each weight alone; empty if one may."""
    found = [name for name in fields_that_find(recipe, hp, model) if name != "optimizer"]
    there = "each replica has but its rows of every weight"
    return f"{in_words(found[0], there)}, or use technique='resident'" if found else ""
