"""Inputs that are made slot by slot, before a pass of all slots.

``Recipe(inputs=...)`` is where batches are mixed, cut and masked: code that draws, and decides by
what it has drawn. Each slot's is run on its own batch, in its own random streams, and what it
makes takes the batch's place (``recipe.Fed``). So the pass itself may still be a graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from shoal.fusion.batches import layout_of
from shoal.fusion.crew import Crew, taking_part
from shoal.fusion.declined import Disagreement
from shoal.recipes.recipe import Fed, autocast, model_inputs


def are_fed(batches: Sequence[Any]) -> bool:
    """Whether this was done to them."""
    return any(type(batch) is Fed for batch in batches)


def fed(
    crew: Crew, batches: Sequence[Any], active: Sequence[bool], *, draws_python: bool
) -> list[Any]:
    """``batches`` with what their trials' recipes make of them; None of slots that are idle.

    ``draws_python``: each has its own streams of Python's and NumPy's random numbers.

    Raises:
        Disagreement: what slots make cannot be stacked.
        Draws: as of ``SlotStreams.by_itself``.
    """
    made: list[Any] = [None] * crew.width
    alike: dict[Hashable, list[int]] = {}
    for slot in taking_part(active):
        recipe = crew.members[slot].recipe
        with (
            autocast(recipe, crew.device),
            crew.streams.as_default(slot),
            crew.streams.by_itself(slot, draws_python),
        ):
            made[slot] = Fed(*model_inputs(recipe, batches[slot]), batches[slot])
        alike.setdefault(layout_of(made[slot]), []).append(slot)
    if len(alike) > 1:
        words = "what Recipe(inputs=...) makes has other shapes or values in each slot"
        raise Disagreement(words, list(alike.values()))
    return made
