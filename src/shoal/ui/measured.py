"""``shoal plan --measured``: what a plan foretold, beside what its run came to.

[Note: what is compared]
A step is the seconds it takes of its device, as planned and as the median of those that ran. The
study is the plan's own rule (the work over the devices, or the longest trial) over the steps that
ran, beside the time from the first of them to the last. What workers take to start, planning and
validation are in no prediction. Memory is by device, for trials share one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from shoal.core.errors import SpecError, StorageError
from shoal.core.event import Event, StepFinished, StudyStarted, TrialPlanned
from shoal.core.plan import Plan, predict_seconds
from shoal.core.units import Bytes, Seconds, format_bytes, format_seconds
from shoal.observe import jsonl, read_events
from shoal.observe.rows import DeviceRow
from shoal.observe.snapshot import Folder, Snapshot
from shoal.source import load_study
from shoal.ui.failures import ExitCode
from shoal.ui.studies import find_recorded
from shoal.ui.text import DASH, align, how

PLAN = "plan.json"


@dataclass(slots=True)
class Steps:
    """The steps of a study's last plan: of each trial their seconds, and how long all lasted."""

    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    began: float | None = None
    ended: float = 0.0
    _runs_anew: bool = False

    def add(self, event: Event) -> None:
        """Take in an event; a run that plans forgets the one before."""
        if isinstance(event, StudyStarted):
            self._runs_anew = True
        elif isinstance(event, TrialPlanned) and self._runs_anew:
            self._runs_anew = False
            self.seconds.clear()
            self.began = None
        elif isinstance(event, StepFinished):
            self.seconds[event.trial].append(event.seconds)
            self.began = event.time - event.seconds if self.began is None else self.began
            self.ended = event.time

    @property
    def lasted_s(self) -> Seconds:
        """From the beginning of the first step to the end of the last."""
        return Seconds(0.0 if self.began is None else self.ended - self.began)


def planned_place(target: str, directory: Path, given: Sequence[str | None]) -> Path:
    """The directory of a study, by its name, its directory, or the file that defines it.

    ``given`` are the options that say how to plan, which there is nothing to do with.

    Raises:
        SpecError: there is no such study, it has not run, or there are such options.
    """
    if any(option is not None for option in given):
        raise SpecError(
            "--measured is about the plan of a run that was. Leave out --devices, "
            "--device-memory, --host-memory, --technique and --fuse, which say how to plan."
        )
    if not target.partition(".py")[1]:
        return find_recorded(target, directory)
    place = Path(load_study(target).study.directory)
    return find_recorded(place.name, place.parent)


def compare_plan(place: Path, *, as_json: bool) -> int:
    """Print the plan of a study's last run beside what it came to.

    Raises:
        SpecError: there is no plan, or no step of it ran.
        StorageError: the plan or the record cannot be read.
    """
    plan = read_plan(place)
    folder, steps = Folder(), Steps()
    for event in read_events(place):
        folder.add(event)
        steps.add(event)
    snapshot = folder.snapshot()
    if not steps.seconds:
        raise SpecError(
            f"no step of the plan in {place} has run yet, so there is nothing to compare it with."
        )
    record = comparison(plan, snapshot, steps)
    print(jsonl.dumps(record, indent=2) if as_json else describe(record, place))
    return ExitCode.DONE


def read_plan(place: Path) -> Plan:
    """The plan of the last run of a study.

    Raises:
        SpecError: it never got so far as to have one.
        StorageError: it cannot be read.
    """
    path = place / PLAN
    if not path.exists():
        raise SpecError(f"no run of the study in {place} has made a plan yet.")
    try:
        return Plan.from_json(path.read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path} cannot be read ({error!r}); a run of the study writes it anew."
        ) from error


def comparison(plan: Plan, snapshot: Snapshot, steps: Steps) -> dict[str, Any]:
    """What was planned and what was measured: the study, its devices, its trials."""
    ran = {job.trial: len(steps.seconds.get(job.trial, ())) for job in plan.jobs}
    return {
        "study": snapshot.study,
        "planned_s": predict_seconds(plan, ran),
        "measured_s": float(steps.lasted_s),
        "whole_run_s": float(snapshot.seconds),
        "devices": [_device(row) for row in snapshot.devices],
        "trials": [
            {
                "trial": job.trial,
                "how": how(snapshot.trial(job.trial)),
                "steps": ran[job.trial],
                "planned_step_s": float(job.takes_s),
                "measured_step_s": median(taken) if (taken := steps.seconds[job.trial]) else None,
            }
            for job in plan.jobs
        ],
    }


def _device(row: DeviceRow) -> dict[str, Any]:
    return {
        "device": row.name,
        "planned_bytes": row.predicted_bytes or None,
        "measured_bytes": row.peak_bytes,
        "budget_bytes": row.budget_bytes,
    }


def describe(record: dict[str, Any], place: Path) -> str:
    """The comparison as text; ``times`` is what was measured over what was planned."""
    study = [["steps", *_pair(record, "{}_s", _seconds)]]
    devices = [[r["device"], *_pair(r, "{}_bytes", _bytes)] for r in record["devices"]]
    trials = [
        [str(r["trial"]), r["how"], str(r["steps"]), *_pair(r, "{}_step_s", _seconds)]
        for r in record["trials"]
    ]
    pair = ("planned", "measured", "times")
    return "\n".join(
        [
            f"study {record['study']} in {place}: the plan of its last run, and what it came to",
            "",
            align(["time of all", *pair], study),
            "",
            align(["peak of", *pair], devices),
            "",
            align(["trial", "how", "steps", "a step: planned", "measured", "times"], trials),
            "",
            f"the whole run, with starting, planning and validation, took "
            f"{_seconds(record['whole_run_s'])}",
        ]
    )


def _pair(record: dict[str, Any], name: str, words: Any) -> Iterable[str]:
    """Planned, measured, and how many times the first the second is."""
    planned, measured = record[name.format("planned")], record[name.format("measured")]
    times = f"{measured / planned:.2f}" if planned and measured else DASH
    return (*(DASH if x is None else words(x) for x in (planned, measured)), times)


def _seconds(value: float) -> str:
    return format_seconds(Seconds(value))


def _bytes(value: int) -> str:
    return format_bytes(Bytes(value))
