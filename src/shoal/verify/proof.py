"""A study's trials held against training alone, for whoever asks in Python."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import SpecError
from shoal.observe.reader import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.pystate import Ambient
from shoal.recipes.named import Origin
from shoal.recipes.recipe import Recipe
from shoal.source import keeping_arguments
from shoal.verify.choose import rows_to_verify
from shoal.verify.compare import TrialVerdict, verify_trials
from shoal.verify.record import recorded_recipe
from shoal.verify.words import describe_verdict, describe_verdicts, nothing_compared, settings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What came of it; ``print`` shows what ``shoal verify`` does.

    ``verdicts`` are one for each trial, ``settings`` by its number what tells it from others.
    """

    verdicts: tuple[TrialVerdict, ...]
    settings: Mapping[int, str]

    @property
    def equal(self) -> bool:
        """Whether every trial that could be compared has the bits of training alone."""
        return all(verdict.equal or verdict.skipped for verdict in self.verdicts)

    def __bool__(self) -> bool:
        return self.equal

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook shows where this is a cell's last expression."""
        printer.text(str(self))

    def __str__(self) -> str:
        lines = (describe_verdict(one, self.settings[one.number]) for one in self.verdicts)
        return "\n".join([*lines, describe_verdicts(self.verdicts)])


def verify_report(
    place: Path, trials: int | Sequence[int] | None, recipe: Recipe | Origin | None
) -> Verification:
    """Train ``trials`` again in this process and compare; a number is how many.

    Raises:
        SpecError: there is no such trial, none could be compared, nothing says what the
            recipe is, or ``trials`` is neither a number nor numbers.
    """
    snapshot = Snapshot.of(read_outline(place))
    count, numbers = _asked_for(trials)
    rows = rows_to_verify(place, snapshot, count, numbers)
    with keeping_arguments():
        if not isinstance(recipe, Recipe):
            recipe, _ = recorded_recipe(place, snapshot, None)
        with _as_it_was(recipe):
            verdicts = tuple(verify_trials(place, rows, recipe=recipe))
    if all(verdict.skipped for verdict in verdicts):
        raise SpecError(nothing_compared(verdicts))
    return Verification(verdicts=verdicts, settings=settings_of(snapshot))


def _asked_for(trials: Any) -> tuple[int | None, Sequence[int]]:
    """How many trials, or which; numbers of any kind, also NumPy's."""
    if trials is None:
        return None, ()
    if (count := _whole(trials)) is not None:
        return count, ()
    is_several = isinstance(trials, Iterable) and not isinstance(trials, str | bytes | Mapping)
    numbers = [_whole(one) for one in trials] if is_several else [None]
    if None in numbers:
        raise SpecError(
            "verify takes how many trials, verify(3), or the numbers of those, verify([0, 4]); "
            f"got {trials!r}."
        )
    return None, [number for number in numbers if number is not None]


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):  # an int to Python, and no number of trials
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


@contextmanager
def _as_it_was(recipe: Recipe) -> Iterator[None]:
    """The globals that the recipe's code reads are as before then: somebody goes on with them."""
    everything = Ambient(recipe, all_code=True)
    before = everything.take()
    try:
        yield
    finally:
        everything.put(before)
