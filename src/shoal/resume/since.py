"""Whether a recipe is still the one that a study's trials were trained with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import SpecError, StorageError
from shoal.core.studyfiles import RECORD
from shoal.resume.form import record_from_json
from shoal.resume.recipe import describe_recipe
from shoal.resume.refuse import differences

_NAMED = 5


def changed_since(study_dir: str | os.PathLike[str], recipe: Any) -> tuple[str, ...]:
    """The names of what changed of a recipe that was imported again since its study trained.

    Nothing where that cannot be told, as the record is gone or damaged.
    """
    path = Path(study_dir) / RECORD
    try:
        recorded = record_from_json(path.read_text(), str(path)).recipe
    except (OSError, UnicodeDecodeError, SpecError, StorageError):
        return ()
    now = describe_recipe(recipe)
    return () if recorded.is_same(now) else tuple(differences(recorded, now)[0])


def changed_words(changed: Sequence[str]) -> str:
    """What to say of that."""
    names = ", ".join(changed[:_NAMED]) + " and others" * (len(changed) > _NAMED)
    return f"the recipe has changed since it trained ({names}). Put it back, or pass that one"
