"""A warm clone begins with a copy of its parent's newest generation, in a place of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from shoal.core.errors import SpecError
from shoal.core.spec import TrialSpec
from shoal.execution.trial import Start
from shoal.observe.reader import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.runtime.saving import checkpoint


def clear(directory: str | os.PathLike[str], trial: int) -> None:
    """Remove what a clone that was never run left in the place of a new trial.

    Raises:
        StorageError: the disk refuses.
    """
    place = checkpoint.generations(directory, trial)
    for generation in place.all():
        place.remove(generation)


def refuse_idle(
    clones: Iterable[TrialSpec], starts: Mapping[int, Start], totals: Mapping[int, int | None]
) -> None:
    """Refuse warm clones that would begin where trials end.

    Raises:
        SpecError: one has no step left to do.
    """
    for clone in clones:
        start, total = starts.get(clone.number), totals.get(clone.number)
        if start is not None and start.warm and total is not None and start.step >= total:
            raise SpecError(
                f"a clone of trial {clone.parent} would begin after step {start.step} of {total}, "
                "with nothing left to train: its parent is done. Clone it cold (--cold, "
                "warm=False), or have the study train for longer before you clone it."
            )


def begin_warm(directory: str | os.PathLike[str], parent: int, clone: int) -> Start:
    """Give ``clone`` its parent's state as its first generation; the files are shared links.

    Raises:
        SpecError: the parent has no state to begin from.
        StorageError: the disk refuses.
    """
    found = checkpoint.latest(directory, parent)
    if found is None or not checkpoint.has_state(found):
        what = "only its weights were kept" if found else _why_nothing(directory, parent)
        raise SpecError(
            f"trial {parent} has no state that a clone could begin from: {what}. Clone it cold "
            "(--cold, warm=False), or another trial."
        )
    clear(directory, clone)
    place = checkpoint.generations(directory, clone)
    manifest = found.manifest
    with place.begin(found.step) as draft:
        for name in manifest.files:
            draft.link(found, name)
        written = draft.commit(**{**manifest.meta, "ended": False})
    return Start(step=written.step, restore=str(written.path), warm=True)


def _why_nothing(directory: str | os.PathLike[str], trial: int) -> str:
    """Why a trial has no generation that could be read: by what is on record of it."""
    rows = Snapshot.of(read_outline(directory)).trials
    if any(row.checkpoint for row in rows if row.number == trial):
        return "what it saved was not kept (keep_finished=), or is damaged or gone"
    return "it has saved none yet"
