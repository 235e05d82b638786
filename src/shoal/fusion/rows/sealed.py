"""A loss that reads hyperparameters, in the code of an array: only by the names that it spells.

What it reads by another name is no part of a trial's signature, and no constant of a graph: the
next trial of a slot would train with this one's. See ``shoal.recipes.bound``.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import NoReturn

from shoal.core.spec import HyperParameters
from shoal.fusion.declined import Declined
from shoal.recipes.bound import OfTrial, Rest
from shoal.recipes.recipe import Recipe


class Sealed(Rest):
    """What no value is: a name that is spelled, of no trial here; any other is refused."""

    __slots__ = ()

    def behind(self, name: str) -> HyperParameters:
        """Where a name is looked up that no trial of the array has.

        Raises:
            Declined: the code does not spell it.
        """
        if name not in self.names:
            _refuse(name)
        return self.all


def _refuse(name: str) -> NoReturn:
    if not name:
        raise Declined(
            "the recipe's loss reads all hyperparameters at once, so what it computes with is not "
            "known of a trial before it runs. Have it read those it needs by name."
        )
    raise Declined(
        f"the recipe's loss reads the hyperparameter {name!r}, and no string in its code is that "
        "name, so what it computes with is not known of a trial before it runs. Write it out."
    )


def seal(rest: Rest) -> Sealed:
    """The same for the code of an array."""
    return Sealed(rest.all, rest.names)


def sealed(recipe: Recipe) -> Recipe:
    """The recipe, whose loss reads what it spells."""
    loss = recipe.loss
    if not isinstance(loss, OfTrial):
        return recipe
    made, hp = copy.copy(loss), loss.hp
    made.hp = hp.over(seal(hp.rest))
    return replace(recipe, loss=made)
