"""``shoal export --optuna``: all trials of a study for Optuna's dashboard."""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path
from typing import Any

from shoal.core import event as events
from shoal.core.units import counted
from shoal.observe import jsonl, read_events, read_outline
from shoal.observe.rows import TrialRow, TrialState
from shoal.observe.snapshot import Folder, Snapshot
from shoal.search.handover import HandedOver, State, write_optuna
from shoal.search.space import check_space
from shoal.ui.failures import ExitCode
from shoal.ui.studies import find_recorded
from shoal.verify import recorded_study

_STATES: dict[TrialState, State] = {
    TrialState.PENDING: "WAITING",
    TrialState.RUNNING: "RUNNING",
    TrialState.FINISHED: "COMPLETE",
    TrialState.PRUNED: "PRUNED",
    TrialState.STOPPED: "PRUNED",  # it has a curve, and no value at its end
    TrialState.FAILED: "FAIL",
}


def export_optuna(
    name: str,
    target: str,
    directory: Path,
    *,
    overwrite: bool = False,
    file: str | None = None,
    as_json: bool = False,
) -> int:
    """Write a study as a SQLite storage of Optuna's, and say how to look at it."""
    place, path = find_recorded(name, directory), Path(target)
    with contextlib.redirect_stdout(sys.stderr):  # what the user's file prints is no answer
        study = recorded_study(place, Snapshot.of(read_outline(place)), file)
    folder, times = Folder(), _Times()
    for event in read_events(place):
        folder.add(event)
        times.add(event)
    snapshot = folder.snapshot()
    trials = [_hand_over(row, snapshot.metric, times) for row in snapshot.trials]
    write_optuna(
        path,
        snapshot.study,
        mode=snapshot.mode,
        metric=snapshot.metric,
        space=check_space(study.space),
        trials=trials,
        overwrite=overwrite,
    )
    record = {"study": snapshot.study, "file": str(path), "trials": len(trials)}
    text = (
        f"{counted(len(trials), 'trial')} of {snapshot.study} written to {path}\n"
        f"next      optuna-dashboard sqlite:///{path}  (pip install optuna-dashboard)"
    )
    print(jsonl.dumps(record, indent=2) if as_json else text)
    return ExitCode.DONE


class _Times:
    """When each trial first ran and when it ended."""

    def __init__(self) -> None:
        self.began: dict[int, float] = {}
        self.ended: dict[int, float] = {}

    def add(self, event: events.Event) -> None:
        """Note the time of an event that begins or ends a trial."""
        match event:
            case events.TrialStarted():
                self.began.setdefault(event.trial, event.time)
            case (
                events.TrialFinished()
                | events.TrialPruned()
                | events.TrialStopped()
                | events.TrialFailed()
            ):
                self.ended[event.trial] = event.time


def _hand_over(row: TrialRow, metric: str, times: _Times) -> HandedOver:
    curve = {entry.step: entry.metrics[metric] for entry in row.history if metric in entry.metrics}
    attributes: dict[str, Any] = {"state": str(row.state), "seed": row.seed, "number": row.number}
    attributes |= {name: value for name, value in row.metrics.items() if math.isfinite(value)}
    if row.checkpoint:
        attributes["checkpoint"] = row.checkpoint
    if row.error:
        attributes["error"] = row.error_line
    return HandedOver(
        point=row.hp,
        state=_STATES[row.state],
        value=row.metrics.get(metric),
        curve=curve,
        began=times.began.get(row.number),
        ended=times.ended.get(row.number),
        attributes=attributes,
    )
