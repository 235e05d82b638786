"""``shoal run`` and ``shoal plan``: a user's study on the devices asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from shoal.hardware import Hardware
from shoal.observe import jsonl
from shoal.observe.rows import TrialState
from shoal.observe.snapshot import Snapshot
from shoal.runtime.pool import WorkerPool
from shoal.source import load_study
from shoal.study import Study
from shoal.ui.failures import ExitCode
from shoal.ui.show import (
    best_trial,
    device_table,
    failure_lines,
    leaderboard,
    read_snapshot,
    study_record,
    trial_record,
)


class HardwareFlags(NamedTuple):
    """What the command line says about devices; None is left to ``Hardware.parse``."""

    devices: str | None
    device_memory: str | None
    host_memory: str | None


def run_file(
    file: str,
    flags: tuple[str | None, str | None, str | None],
    *,
    overwrite: bool,
    as_json: bool,
    workers: WorkerPool | None = None,
) -> int:
    """Run the study of a file to its end; the exit code says whether all trials finished."""
    study = open_study(file)
    hardware = Hardware.parse(*HardwareFlags(*flags))
    study.run(hardware=hardware, overwrite=overwrite, workers=workers)
    place = study.directory
    snapshot = read_snapshot(place, with_actions=True)
    if as_json:
        record = study_record(place, snapshot)
        record["trials"] = [trial_record(row) for row in snapshot.trials]
        print(jsonl.dumps(record, indent=2))
    else:
        print(describe_ending(snapshot, place))
        print(f"next      shoal show {place}, shoal trace {place}, shoal verify {place}")
    return ending_code(snapshot)


def plan_file(
    file: str, flags: tuple[str | None, str | None, str | None], *, as_json: bool
) -> int:
    """Measure the models of a study and print its plan."""
    study = open_study(file)
    hardware = Hardware.parse(*HardwareFlags(*flags))
    print("measuring each distinct model once ...", file=sys.stderr)
    plan = study.plan(hardware=hardware)
    print(plan.to_json() if as_json else plan.explain())
    return ExitCode.DONE


def open_study(file: str) -> Study:
    """The study of a file, which remembers where it came from."""
    loaded = load_study(file)
    study: Study = loaded.study
    study.source = loaded.source
    return study


def ending_code(snapshot: Snapshot) -> ExitCode:
    """What the shell is told of a study that ended."""
    if snapshot.stopped or not snapshot.is_finished:
        return ExitCode.PAUSED
    return ExitCode.TRIALS_FAILED if snapshot.count(TrialState.FAILED) else ExitCode.DONE


def describe_ending(snapshot: Snapshot, place: Path) -> str:
    """What a finished run prints: leaderboard, devices, failures, where the weights are."""
    parts = ["", leaderboard(snapshot), "", device_table(snapshot), ""]
    failures = failure_lines(snapshot)
    if failures:
        parts += [*failures, ""]
    best = best_trial(snapshot)
    if best is not None and best.checkpoint:
        parts.append(f"best      trial {best.number}, weights in {place / best.checkpoint}")
    return "\n".join([*parts, f"events    {place / 'events.jsonl'}"])
