"""Which hyperparameters no code of a recipe reads: a name with a letter too many, mostly.

A model, its data, optimizer and schedule are made for each trial before anything is planned, of
hyperparameters that note what is read (``Reads``). What a forward, a loss or a step of one's own
reads later is not seen. So a name that some code spells counts as read, and where code may still
come to hyperparameters, or they were kept, one of which it spells a part (``f"weight_{i}"``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from shoal.core.reads import Reads
from shoal.core.spec import HyperParameters, Scalar
from shoal.recipes.bound import takes_hp
from shoal.recipes.recipe import Recipe
from shoal.recipes.schedules import build_schedule
from shoal.recipes.spelled import Spelled, spelled_by
from shoal.runtime.wire.messages import Noticed

SEED = "seed"  # shoal's own


class Reading:
    """The hyperparameters of one trial that is being made, and who keeps them."""

    def __init__(self, values: Mapping[str, Scalar]) -> None:
        self.hp = Reads(values)

    def end(self, code: Code) -> Noticed:
        """What nobody reads, and what was asked for and is not there; ``hp`` is gone then.

        What was made of it has to be there: whoever keeps it may read it later.
        """
        reads = self.hp
        unread, missing, held = reads.unread, reads.missing, weakref.ref(reads)
        del self.hp, reads
        if unread:
            unread = code.without(unread, is_kept=held() is not None)
        return Noticed(unread, missing)


class Code:
    """What the functions of a recipe spell; looked for once, when it is asked for."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def without(self, names: Iterable[str], *, is_kept: bool) -> frozenset[str]:
        """Those of the names that no code can come to read.

        ``is_kept``: somebody has the hyperparameters still who was given them.
        """
        spelled = self._all
        if not spelled.is_whole:
            return frozenset()
        left = frozenset(names) - {SEED} - spelled.strings
        if is_kept:  # maybe in an object that reads them as its attributes
            left -= spelled.names
        later = spelled.strings if is_kept else self._later
        return frozenset(name for name in left if not _has_part(name, later))

    @cached_property
    def _all(self) -> Spelled:
        recipe = self._recipe
        made = (recipe.model, recipe.data, recipe.optimizer, recipe.schedule)
        return spelled_by(one for one in (*made, *self._told) if one is not None)

    @cached_property
    def _later(self) -> frozenset[str]:
        """Of what is handed the hyperparameters while a trial trains."""
        return spelled_by(self._told).strings

    @property
    def _told(self) -> list[Any]:
        recipe = self._recipe
        of_batches = (recipe.loss, *(function for _, function in recipe.metric_functions()))
        told: list[Any] = [one for one in of_batches if one is not None and takes_hp(one)]
        told += [one for one in (recipe.step, recipe.evaluate) if one is not None]
        return told + [recipe.clip_grad_norm] * callable(recipe.clip_grad_norm)


def _has_part(name: str, spelled: Iterable[str]) -> bool:
    return any(one and (name.startswith(one) or name.endswith(one)) for one in spelled)


def read_schedule(recipe: Recipe, optimizer: Any, hp: HyperParameters, train: Any) -> Any:
    """The schedule, where it can be made; all counts as read by one that cannot."""
    try:
        return build_schedule(recipe, optimizer, hp, train)
    except Exception:  # it is told of when the trial trains
        list(hp)
        return None
