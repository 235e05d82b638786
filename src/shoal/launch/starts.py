"""Where every trial of a study that ran before goes on, from what is on the disk."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.core import event as events
from shoal.core.errors import SpecError
from shoal.core.plan import Plan
from shoal.core.spec import Scalar
from shoal.execution.trial import Start
from shoal.observe.rows import TrialRow, TrialState
from shoal.observe.snapshot import Snapshot
from shoal.resume import TrialProgress
from shoal.runtime import checkpoint
from shoal.storage.generations import Generation

_NOT_COMPARED = {"cut"}  # how the pilot was compared; a chain that passed it has the same bits


@dataclass(slots=True)
class Restart:
    """What is known of the trials that go on.

    ``finished`` did their last step before a crash that came too soon to say so.
    """

    starts: dict[int, Start] = field(default_factory=dict)
    numerics: dict[int, Mapping[str, Scalar]] = field(default_factory=dict)
    finished: list[events.TrialFinished] = field(default_factory=list)
    happened: list[events.Event] = field(default_factory=list)


def progress_of(directory: Path, snapshot: Snapshot) -> dict[int, TrialProgress]:
    """How far each trial came, as its events and its generations say."""
    return {row.number: _progress(directory, row) for row in snapshot.trials}


def _progress(directory: Path, row: TrialRow) -> TrialProgress:
    return TrialProgress(
        state=row.state,
        step=row.step,
        epoch=row.epoch,
        has_full_state=not row.is_done or _has_state(directory, row),
    )


def _has_state(directory: Path, row: TrialRow) -> bool:
    """Whether an ended trial could train on; without a step it can always begin."""
    newest = checkpoint.generations(directory, row.number).newest(quick=True)
    return newest is not None and checkpoint.has_state(newest)


def restart(
    directory: Path, snapshot: Snapshot, trials: Iterable[int], *, is_longer: bool
) -> Restart:
    """Where ``trials`` go on: each at its newest generation that verifies, or anew.

    ``is_longer``: more steps are asked for than before, so no trial is at its end.
    """
    rows = {row.number: row for row in snapshot.trials}
    found = Restart()
    for trial in trials:
        row = rows.get(trial, TrialRow(number=trial))
        newest = checkpoint.latest(directory, trial, lambda p, why: _damaged(found, p, why))
        if newest is None and not row.step:
            found.starts[trial] = Start(has_run=False)
        elif newest is None:
            found.starts[trial] = Start(has_run=True)
            found.happened.append(_restarted(trial, 0))
        elif newest.manifest.meta.get("ended") and not is_longer and not row.is_done:
            found.finished.append(_finished(row, newest))
        else:
            found.starts[trial] = _start(row, newest)
            found.numerics[trial] = newest.manifest.meta.get("numerics", {})
            found.happened.append(_restarted(trial, newest.step))
    return found


def _start(row: TrialRow, newest: Generation) -> Start:
    return Start(
        step=newest.step,
        restore=str(newest.path),
        warm=newest.manifest.meta.get("trial") != row.number,
        metrics={k: v for k, v in row.metrics.items() if k.startswith("valid_")},
        has_run=row.state is not TrialState.PENDING or row.step > 0,
        device_s=row.seconds,
    )


def _restarted(trial: int, step: int) -> events.Event:
    return events.TrialRestarted(
        time=time.time(), trial=trial, step=step, reason="the study was resumed"
    )


def _finished(row: TrialRow, newest: Generation) -> events.TrialFinished:
    return events.TrialFinished(
        time=time.time(),
        trial=row.number,
        step=newest.step,
        metrics=newest.manifest.meta.get("metrics", {}),
        checkpoint=f"trials/{row.number:04d}/{newest.path.name}",
        seconds=row.seconds,
    )


def _damaged(found: Restart, path: Path, why: str) -> None:
    trial = int(path.parent.name)
    found.happened.append(
        events.CheckpointDamaged(
            time=time.time(),
            trial=trial,
            path=f"trials/{path.parent.name}/{path.name}",
            reason=why,
        )
    )


def check_numerics(plan: Plan, before: Mapping[int, Mapping[str, Scalar]]) -> list[str]:
    """A sentence for each entry of a numerics key that is another one now."""
    sentences = []
    for job in plan.jobs:
        known = before.get(job.trial, {})
        for name in sorted(set(known) & set(job.numerics) - _NOT_COMPARED):
            if known[name] != job.numerics[name]:
                sentences.append(
                    f"{name} of trial {job.trial} was {known[name]!r} and is "
                    f"{job.numerics[name]!r}"
                )
    return sentences


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
