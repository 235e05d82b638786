"""Where a trial is in its validation, for who reads what its code raised there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shoal.core.errors import ShoalError, SpecError
from shoal.data import Feed
from shoal.recipes.ownstep import summed_up
from shoal.recipes.recipe import Batch, Found, Recipe

FIRST_BATCH = "in validation, of its first batch, before anything was trained"
"""Where a trial is measured."""


class Validating:
    """Of one trial: which batch of a validation pass it is at, None outside of one."""

    def __init__(self) -> None:
        self._batch: int | None = None
        self._is_summing = False

    def batches(self, feed: Feed) -> Iterator[Batch]:
        """Those of a pass, one after another."""
        self._batch = 0
        while (batch := feed.next()) is not None:
            yield batch
            self._batch += 1
        self._batch = None

    @contextmanager
    def at(self, batch: int) -> Iterator[None]:
        """Evaluating a batch that was read before, maybe by another device's process."""
        before, self._batch = self._batch, batch
        yield  # what is raised here leaves it there
        self._batch = before

    def summed_up(self, recipe: Recipe, found: Sequence[Found]) -> dict[str, float]:
        """What a pass found, of what it found of each batch."""
        self._is_summing = bool(found)
        metrics = summed_up(recipe, found)
        self._is_summing = False
        return metrics

    def told(self, error: BaseException, trial: int, step: int) -> BaseException:
        """The same error, which says where in a validation it was raised, if it was in one."""
        where = f"in the validation of trial {trial} after step {step}"
        if self._is_summing:
            note(error, f"{where}, of all its batches")
        elif self._batch is not None:
            note(error, f"{where}: batch {self._batch}, counted from 0")
        return error


@contextmanager
def in_validation(words: str) -> Iterator[None]:
    """What is raised inside says so."""
    try:
        yield
    except Exception as error:
        note(error, words)
        raise


def note(error: BaseException, words: str) -> None:
    """Say below an error's message where it was raised, once, if that is a user's code."""
    is_own = isinstance(error, ShoalError) and not isinstance(error, SpecError)
    notes: Sequence[Any] = getattr(error, "__notes__", ())
    if not is_own and words not in notes:
        error.add_note(words)
