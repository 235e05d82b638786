"""A warm clone begins with a copy of its parent's newest generation, in a place of its own."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.core.errors import SpecError
from shoal.core.spec import Scalar, TrialSpec
from shoal.core.units import counted
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
    clones: Iterable[TrialSpec],
    starts: Mapping[int, Start],
    totals: Mapping[int, int | None],
    trials: Iterable[TrialSpec],
    place: Path,
) -> None:
    """Refuse warm clones that would begin where trials end.

    ``trials``: all of the study in ``place``.

    Raises:
        SpecError: one has no step left to do.
    """
    of = {trial.number: trial.hp for trial in trials}
    for clone in clones:
        start, total = starts.get(clone.number), totals.get(clone.number)
        if start is not None and start.warm and total is not None and start.step >= total:
            raise SpecError(
                f"a clone of trial {clone.parent} would begin after step {start.step} of {total}, "
                "with nothing left to train: its parent is done. One that begins anew is: "
                f"{_cold(clone, of, place)} (in Python CloneTrial(..., warm=False)). For one that "
                "goes on from its state raise epochs= or steps= in the study's file first."
            )


def refuse_other_epochs(
    clones: Iterable[TrialSpec],
    starts: Mapping[int, Start],
    batches: Mapping[int, int | None],
    counts: str,
) -> None:
    """Refuse warm clones whose epochs have another length than their parent's, where they count.

    ``batches``: of an epoch, by trial; ``counts``: what counts epochs, in words, if anything does.

    Raises:
        SpecError: nobody could say in which epoch such a clone begins.
    """
    for clone in clones if counts else ():
        start = starts.get(clone.number)
        if start is None or not start.warm or not start.restore:
            continue
        then = checkpoint.at(start.restore).manifest.meta.get("batches")
        now = batches.get(clone.number)
        if then is not None and now is not None and then != now:
            raise SpecError(
                f"a clone of trial {clone.parent} would read {counted(now, 'batch', 'batches')} "
                f"an epoch, and its parent read {then}: in which epoch it begins after step "
                f"{start.step} nobody can say, and {counts} counts epochs. Clone it cold "
                "(--cold, warm=False), or have the length, and the schedule, go by steps."
            )


def _cold(clone: TrialSpec, of: Mapping[int, Mapping[str, Scalar]], place: Path) -> str:
    """What to type for the same clone from its beginning."""
    parent = of.get(-1 if clone.parent is None else clone.parent, {})
    words = ["shoal", "clone", str(place), str(clone.parent)]
    for name, value in clone.hp.items():
        if repr(value) != repr(parent.get(name)):
            words += ["--set", f"{name}={value}"]
    return f"{shlex.join(words)} --cold"


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
            f"trial {parent} has no state that a clone could begin from: {what}. Type the same "
            "command with --cold, which begins it anew (in Python warm=False), or clone another "
            "trial."
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
