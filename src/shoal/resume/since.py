"""Whether a recipe is still the one that a study's trials were trained with.

[Note: another recipe] With ``accept_recipe`` a study goes on with another recipe: its record has
the text of each, numbered from 0, and a trial's events say which of them it trained with from
which step on (``observe.rows.TrainedWith``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from shoal.core.errors import SpecError, StorageError
from shoal.core.studyfiles import RECORD
from shoal.core.units import counted
from shoal.resume.form import record_from_json
from shoal.resume.recipe import RecipeRecord
from shoal.resume.refuse import differences

_NAMED = 5


def changed_since(
    study_dir: str | os.PathLike[str], now: RecipeRecord, number: int | None
) -> tuple[str, ...]:
    """The names of what changed of a recipe that was imported again since its study trained.

    ``now``: what it is, before trials were trained here, which may keep something in globals.
    ``number``: of the study's recipe that counts; None is the one of now. Nothing where that
    cannot be told, as the record is gone or damaged.
    """
    if not (recorded := _recorded(study_dir)):
        return ()
    known = dict(enumerate(recorded))
    then = known.get(-1 if number is None else number, recorded[-1])
    return () if then.is_same(now) else tuple(differences(then, now)[0])


def two_recipes(study_dir: str | os.PathLike[str], trained: Sequence[tuple[int, int]]) -> str:
    """What to say of a trial that trained with more than one recipe; else nothing.

    ``trained``: after which step with the recipe of which number.
    """
    recorded = _recorded(study_dir)
    said = []
    for (_, was), (step, now) in pairwise(trained):
        names = list[str]()
        if max(was, now) < len(recorded):
            if recorded[was].is_same(recorded[now]):  # it was put back
                continue
            names = differences(recorded[was], recorded[now])[0]
        said.append(f"another one after step {step}" + f" (changed: {_some(names)})" * bool(names))
    if not said:
        return ""
    return f"it trained with {counted(len(said) + 1, 'recipe')}: {', '.join(said)}"


def changed_words(changed: Sequence[str]) -> str:
    """What to say of that."""
    some = _some(changed)
    return f"the recipe has changed since it trained ({some}). Put it back, or pass that one"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + " and others" * (len(names) > _NAMED)


def _recorded(study_dir: str | os.PathLike[str]) -> tuple[RecipeRecord, ...]:
    """The study's recipes by number; none where its record is gone or damaged."""
    path = Path(study_dir) / RECORD
    try:
        return record_from_json(path.read_text(), str(path)).recipes
    except (OSError, UnicodeDecodeError, SpecError, StorageError):
        return ()
