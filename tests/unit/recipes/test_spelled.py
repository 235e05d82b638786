"""What code spells, of values that would rather not be looked into."""

from __future__ import annotations

from shoal.fusion.effects.globals import identity
from shoal.recipes.spelled import spelled


class Shy(dict):
    """Has its items, and shows them to nobody who asks."""

    def items(self):
        raise RuntimeError("these are mine")

    keys = values = __iter__ = items


SETTINGS = Shy(scale="warm")


def reads(hp):
    return SETTINGS["scale"]


def test_a_mapping_whose_items_raise_is_looked_into_as_the_dict_that_it_is():
    assert {"scale", "warm"} <= spelled(reads)
    assert identity(SETTINGS) == identity({"scale": "warm"})
