"""Where every trial of a study that ran before goes on, from what is on the disk.

[Note: what counts]
A generation counts once the database has every step that it holds: its CheckpointWritten is
there, or a later step. A kill can come between the two; then the generation before it counts,
and the last steps are done again, so that the record has no gap. What does not count is a
stray, and goes when the new plan stands. A database that lacks more than a kill can take
was lost, or is an old copy: then the generations are what there is. So they are where those
that counted were collected already (``keep=1``, or several saves while the database was slow):
a gap in a curve is better than training lost.

    generations   step 10   step 20            step 20 is a stray: go on from 10
    database      S1 .. S10 Written(10) S11 .. S19 (kill)
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

from shoal.core import event as events
from shoal.core.errors import SpecError, StorageError
from shoal.core.plan import Plan
from shoal.core.seats import epochs_of, is_continued
from shoal.core.spec import Scalar
from shoal.core.studyfiles import generation_name
from shoal.core.units import counted
from shoal.core.whys import UNFUSED
from shoal.execution.ladder import bits_of
from shoal.execution.trial import Start
from shoal.kernels.kernelchoice import TOLD
from shoal.observe.rows import TrialRow, TrialState
from shoal.observe.snapshot import Snapshot
from shoal.resume import TrialProgress
from shoal.runtime.saving import checkpoint
from shoal.runtime.saving.fitting import kind_of
from shoal.storage.generations import Generation, Generations
from shoal.storage.manifest import Manifest

_STEP = re.compile(r"step-([0-9]+)")
_LATE_STEPS = 1000  # as many may be on their way to the database when a kill comes


@dataclass(slots=True)
class Restart:
    """What is known of the trials that go on.

    ``finished`` did their last step before a crash that came too soon to say so. ``strays``
    are generations that nobody may go on from.
    """

    starts: dict[int, Start] = field(default_factory=dict)
    numerics: dict[int, Mapping[str, Scalar]] = field(default_factory=dict)
    finished: list[events.TrialFinished] = field(default_factory=list)
    happened: list[events.Event] = field(default_factory=list)
    strays: list[Generation] = field(default_factory=list)


def progress_of(
    directory: Path, snapshot: Snapshot, unit: str, trials: Iterable[int] = ()
) -> dict[int, TrialProgress]:
    """How far each trial came, as its events and its generations say.

    ``trials``: those that were asked for; of one that the database lost its generations say it.
    """
    known = {row.number: _progress(directory, row, unit) for row in snapshot.trials}
    return known | {n: _lost(directory, n, unit) for n in trials if n not in known}


def _lost(directory: Path, trial: int, unit: str) -> TrialProgress:
    place = checkpoint.generations(directory, trial)
    newest = place.newest(quick=True, among=lambda one: _trial_of(one) == trial)
    if newest is None:
        return TrialProgress()
    meta, has_ended = newest.manifest.meta, bool(newest.manifest.meta.get("ended"))
    length, batches = meta.get("length"), meta.get("batches")
    epoch = 0
    if has_ended and unit == "epochs":
        epoch = length or 0
    elif batches:
        epoch = ceil(newest.step / ceil(batches / meta.get("numerics", {}).get("accumulate", 1)))
    return TrialProgress(
        step=newest.step,
        epoch=epoch,
        has_full_state=checkpoint.STATE in newest.manifest.files,
        target=length if has_ended else None,
    )


def _progress(directory: Path, row: TrialRow, unit: str) -> TrialProgress:
    place = checkpoint.generations(directory, row.number)
    newest = place.newest(quick=True) if row.is_done else None
    manifest = newest.manifest if newest is not None else None  # thousands of trials may be there
    is_whole = manifest is not None and checkpoint.STATE in manifest.files
    return TrialProgress(
        state=row.state,
        step=row.step,
        epoch=row.epoch,
        has_full_state=not row.is_done or is_whole,
        target=_target(row, manifest, unit),
    )


def _target(row: TrialRow, manifest: Manifest | None, unit: str) -> int | None:
    """How long an ended trial was to train; the record may have grown since."""
    length = manifest.meta.get("length") if manifest is not None else None
    if isinstance(length, int):
        return length
    if row.state is not TrialState.FINISHED:
        return None
    return (row.epoch if unit == "epochs" else row.step) or None


def restart(
    directory: Path,
    snapshot: Snapshot,
    trials: Iterable[int],
    *,
    length: int,
    warm: Collection[int] = (),
    worked_s: Mapping[int, float] | None = None,
    varies: bool = False,
) -> Restart:
    """Where ``trials`` go on: each at its newest generation that counts, or anew.

    Args:
        length: Epochs or steps that are asked for now.
        warm: The trials whose first generation is their parent's.
        worked_s: Seconds of a device that each trial had.
        varies: Whether hyperparameters change while trials train.
    """
    rows = {row.number: row for row in snapshot.trials}
    found = Restart()
    for trial in trials:
        row = rows.get(trial, TrialRow(number=trial))
        counts = _Counts(row, is_known=trial in rows, is_warm=trial in warm)
        newest = _newest(found, directory, row, counts)
        if newest is None:
            found.starts[trial] = Start(has_run=row.step > 0)
            found.happened += [_restarted(row, 0)] * bool(row.step)
        elif _is_at_end(newest, length) and not row.is_done:
            found.finished.append(_finished(row, newest))
        else:
            start = _start(row, newest, (worked_s or {}).get(trial, 0.0))
            is_own = newest.manifest.meta.get("trial") == trial
            found.starts[trial] = _with_hp(start, newest) if varies and is_own else start
            found.numerics[trial] = newest.manifest.meta.get("numerics", {})
            found.happened.append(_restarted(row, newest.step))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Whether a trial may go on from a generation; ``is_known`` to the database."""

    row: TrialRow = field(kw_only=False)
    is_known: bool
    is_warm: bool

    def __call__(self, generation: Generation) -> bool:
        row = self.row
        if not self.is_known or (self.is_warm and not row.checkpoint):
            return self.is_warm or _trial_of(generation) in (None, row.number)
        acknowledged = _STEP.search(row.checkpoint)
        last = max(row.step, int(acknowledged[1]) if acknowledged else 0)
        is_on_record = generation.path.name == Path(row.checkpoint).name
        return is_on_record or not last <= generation.step <= last + _LATE_STEPS


def _trial_of(generation: Generation) -> int | None:
    """Whose state it is; None of one whose manifest cannot be read."""
    try:
        return int(generation.manifest.meta["trial"])
    except StorageError:  # whoever verifies it will say so
        return None


def _newest(found: Restart, directory: Path, row: TrialRow, counts: _Counts) -> Generation | None:
    """The newest that counts and verifies; where all that did are gone, the newest there is."""
    place = checkpoint.generations(directory, row.number)
    newest = place.newest(lambda path, why: _damaged(found, path, why), among=counts)
    strays = [generation for generation in place.all() if not counts(generation)]
    if newest is None and row.checkpoint:
        newest = place.newest(among=strays.__contains__)
    found.strays += [stray for stray in strays if newest is None or stray > newest]
    return newest


def _is_at_end(generation: Generation, length: int) -> bool:
    meta = generation.manifest.meta
    return bool(meta.get("ended")) and meta.get("length", length) >= length


def remove_strays(strays: Iterable[Generation]) -> None:
    """Remove generations that do not count.

    Raises:
        StorageError: the disk refuses.
    """
    for stray in strays:
        Generations(stray.path.parent).remove(stray)


def _start(row: TrialRow, newest: Generation, worked_s: float) -> Start:
    return Start(
        step=newest.step,
        restore=str(newest.path),
        warm=checkpoint.is_warm(newest, row.number),
        metrics={k: v for k, v in row.metrics.items() if k.startswith("valid_")},
        has_run=row.state is not TrialState.PENDING or row.step > 0,
        device_s=worked_s,
    )


def _with_hp(start: Start, newest: Generation) -> Start:
    """With the hyperparameters that the state goes on with."""
    return replace(start, hp=dict(newest.manifest.meta["hp"]))


def _restarted(row: TrialRow, step: int) -> events.Event:
    reason, lost = "the study was resumed", row.step - step
    if lost > 0:
        unsaved = "" if step else "unsaved, "
        reason += f"; {unsaved}{counted(lost, 'step')} are done again"
    return events.TrialRestarted(time=time.time(), trial=row.number, step=step, reason=reason)


def _finished(row: TrialRow, newest: Generation) -> events.TrialFinished:
    return events.TrialFinished(
        time=time.time(),
        trial=row.number,
        step=newest.step,
        metrics=newest.manifest.meta.get("metrics", {}),
        checkpoint=generation_name(row.number, newest.path.name),
        seconds=row.seconds,
    )


def _damaged(found: Restart, path: Path, why: str) -> None:
    trial = int(path.parent.name)
    found.happened.append(
        events.CheckpointDamaged(
            time=time.time(),
            trial=trial,
            path=generation_name(trial, path.name),
            reason=why,
        )
    )


ALONE: Mapping[str, Scalar] = {
    "array": "none",
    "compiled modules": 0,
    "copies": 1,
    "loss_rows": "all at once",
    "replicas": 1,
    "schedule": "each step",
    "sums": "in order",
    "use_cache": "as it is",
    "weights": "newest",
    **dict.fromkeys(TOLD, "no"),
    "default type": "float32",
}
"""What a numerics key says by leaving it out."""


_OF_RECIPE = ("optimizer", "schedule")
"""What another recipe changes, and no machine: whoever takes up a trial's state holds it against
that (``runtime/saving/fitting.py``), and says so of that trial alone."""


def _of_recipe(name: str, key: Mapping[str, Scalar]) -> Scalar:
    return kind_of(key) if name == "optimizer" else key[name]


def _in_full(key: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
    whole: dict[str, Scalar] = {"micro_batches": key["accumulate"]} if "accumulate" in key else {}
    return {**ALONE, **whole, **bits_of(key)}


def check_numerics(
    plan: Plan, before: Mapping[int, Mapping[str, Scalar]], *, accepted: bool = False
) -> list[str]:
    """A sentence for each entry of a numerics key that is another one now.

    ``accepted``: another recipe was, and what it changes is no change of the machine.
    """
    sentences = []
    for job in plan.jobs:
        known = before.get(job.trial, {})
        now = _in_full(job.numerics)
        then = _in_full(known) if known else {}
        for name in sorted(set(then) & set(now)):
            if name == "array" and _is_on_record(then[name], now[name]):
                continue
            if accepted and name in _OF_RECIPE and _of_recipe(name, then) != _of_recipe(name, now):
                continue
            if then[name] != now[name]:
                why = next((why for why in job.why if why.startswith(UNFUSED)), "")
                sentences.append(
                    f"{name} of trial {job.trial} was {then[name]!r} and is {now[name]!r}"
                    f"{f' ({why})' if name == 'array' and why else ''}"
                )
    return sentences


def asked_seats(plan: Plan, recorded: Mapping[int, Mapping[str, Scalar]]) -> list[str]:
    """A sentence for each trial that has another seat from here on, because it was asked for."""
    sentences = []
    for job in plan.jobs:
        asked = {epoch for epoch in epochs_of(job.numerics) if epoch.asked}
        new = asked.difference(epochs_of(recorded.get(job.trial, {})))
        sentences += [f"trial {job.trial} goes on elsewhere, {epoch}" for epoch in new]
    return sentences


def _is_on_record(then: Scalar, now: Scalar) -> bool:
    """Whether what a trial's array has become is told already: it has another seat."""
    return is_continued("alone" if then == ALONE["array"] else then, now)


def refuse_numerics(changes: list[str]) -> None:
    """Raise for a trial that would go on to other bits.

    Raises:
        SpecError: names what differs.
    """
    if changes:
        shown = "; ".join(changes[:5]) + ("; ..." if len(changes) > 5 else "")
        raise SpecError(
            f"trials would go on to other bits than before: {shown}. Resume with the software "
            "and the devices that began them, or accept it with accept_numerics=True "
            "(--accept-numerics): the change is recorded."
        )
