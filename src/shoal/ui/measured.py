"""``shoal plan --measured``: what a plan foretold, beside what its run came to.

[Note: what is compared]
Of the last run that made a plan. A step is the seconds from the step before it on its device,
shared with the trials that are there too: the median, which leaves out a validation pass now and
then. Of an array it is a share of its trials', idle slots being theirs too. The study is the
plan's own rule (the work over the devices, or the longest trial) with the seconds of all steps
that ran, beside the plan's for as many; so pauses and waits are left out, and validation is not.
A device's peak stands beside what was predicted for the trials that it had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from shoal.core.errors import SpecError, StorageError
from shoal.core.event import (
    ActionFinished,
    Event,
    PeakMeasured,
    StepFinished,
    StudyStarted,
    TrialPlanned,
    TrialReplanned,
)
from shoal.core.plan import Job, Plan, seconds_of_work
from shoal.core.studyfiles import PLAN
from shoal.core.units import counted, format_bytes, format_seconds
from shoal.observe import jsonl, read_events
from shoal.observe.snapshot import Folder, Snapshot
from shoal.source import load_study
from shoal.ui.failures import ExitCode
from shoal.ui.studies import find_recorded
from shoal.ui.text import DASH, align, how


@dataclass(slots=True)
class LastRun:
    """What was measured in the last run of a study that made a plan.

    ``steps`` are the seconds of each trial's, ``peaks`` the largest of each device.
    """

    steps: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    peaks: dict[str, PeakMeasured] = field(default_factory=dict)
    replanned: set[int] = field(default_factory=set)
    began: float = 0.0
    first_step: float | None = None
    last_step: float = 0.0
    ended: float = 0.0
    _next: float | None = None  # when a run began that has no plan yet

    def add(self, event: Event) -> None:
        """Take in an event; a run that plans forgets the one before."""
        if isinstance(event, StudyStarted):
            self._next = event.time
        elif isinstance(event, TrialPlanned) and self._next is not None:
            self._begin(self._next)
        if self._next is None and not isinstance(event, ActionFinished):
            self.ended = event.time
            self._measure(event)

    def _begin(self, began: float) -> None:
        self.steps.clear()
        self.peaks.clear()
        self.replanned.clear()
        self.began, self.first_step, self._next = began, None, None

    def _measure(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self.steps[event.trial].append(event.seconds)
            if self.first_step is None:
                self.first_step = event.time - event.seconds
            self.last_step = event.time
        elif isinstance(event, TrialReplanned):
            self.replanned.add(event.trial)
        elif isinstance(event, PeakMeasured):
            known = self.peaks.get(event.device)
            if known is None or event.peak_bytes >= known.peak_bytes:
                self.peaks[event.device] = event


def planned_place(target: str, directory: str | None, given: Sequence[str | None]) -> Path:
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
    if not target.endswith(".py") and ":" not in target:
        return find_recorded(target, Path(directory or "runs"))
    if directory is not None:
        raise SpecError(
            f"{target} says where its study is kept. Leave out --directory, or give the study's "
            "name instead of its file."
        )
    place = Path(load_study(target).study.directory)
    return find_recorded(str(place), place.parent)


def compare_plan(place: Path, *, as_json: bool) -> int:
    """Print the plan of a study's last run beside what it came to.

    Raises:
        SpecError: there is no plan, or no step of it ran.
        StorageError: the plan or the record cannot be read.
    """
    plan = read_plan(place)
    folder, run = Folder(), LastRun()
    for event in read_events(place):
        folder.add(event)
        run.add(event)
    if not run.steps:
        raise SpecError(
            f"no step of the plan in {place} has run yet, so there is nothing to compare it with."
        )
    record = comparison(plan, folder.snapshot(), run)
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
        return Plan.from_json(path.read_bytes())
    except (OSError, SpecError) as error:
        raise StorageError(
            f"{path} cannot be read: {error} A run of the study writes it anew."
        ) from error


def comparison(plan: Plan, snapshot: Snapshot, run: LastRun) -> dict[str, Any]:
    """What was planned and what was measured: the study, its devices, its trials.

    Trials that came while the study ran (a sampler's, those of extend and clone) are in no
    plan: they are counted in ``later_trials``, and in none of the seconds.
    """
    taken = {job.trial: run.steps.get(job.trial, []) for job in plan.jobs}
    foretold = {job.trial: float(job.takes_s) * len(taken[job.trial]) for job in plan.jobs}
    return {
        "study": snapshot.study,
        "planned_s": seconds_of_work(plan, foretold),
        "measured_s": seconds_of_work(plan, {trial: sum(all_) for trial, all_ in taken.items()}),
        "steps_lasted_s": run.last_step - (run.first_step or 0.0),
        "run_lasted_s": run.ended - run.began,
        "later_trials": len(run.steps.keys() - taken.keys()),
        "devices": [_device(device.name, run) for device in plan.devices],
        "trials": [_trial(job, taken[job.trial], snapshot, run) for job in plan.jobs],
    }


def _device(name: str, run: LastRun) -> dict[str, Any]:
    peak = run.peaks.get(name)
    return {
        "device": name,
        "planned_bytes": peak.predicted_bytes if peak else None,
        "measured_bytes": peak.peak_bytes if peak else None,
        "budget_bytes": peak.budget_bytes if peak else None,
    }


def _trial(job: Job, taken: Sequence[float], snapshot: Snapshot, run: LastRun) -> dict[str, Any]:
    return {
        "trial": job.trial,
        "how": how(snapshot.trial(job.trial)),
        "replanned": job.trial in run.replanned,
        "steps": len(taken),
        "planned_step_s": float(job.takes_s),
        "measured_step_s": median(taken) if taken else None,
    }


def describe(record: Mapping[str, Any], place: Path) -> str:
    """The comparison as text; ``times`` is what was measured over what was planned."""
    pair = ("planned", "measured", "times")
    later = counted(record["later_trials"], "trial")
    whole = [
        "'all steps' is their work, validation between them included, spread over the devices; "
        "'a step' is a median. With waits and pauses the first step "
        f"to the last took {format_seconds(record['steps_lasted_s'])}, and the run, with "
        f"starting and planning, {format_seconds(record['run_lasted_s'])}."
    ]
    if record["later_trials"]:
        whole.append(f"{later} came while it ran, and no plan foretold them: they are left out.")
    if any(trial["replanned"] for trial in record["trials"]):
        whole.append("*: it was planned anew while it ran; the steps of both plans are one here.")
    return "\n".join(
        [
            f"study {record['study']} in {place}: the plan of its last run, and what it came to",
            "",
            align(["time of", *pair], [["all steps", *_pair(record, "{}_s", format_seconds)]]),
            "",
            align(["peak of", *pair], list(map(_device_cells, record["devices"]))),
            "",
            align(
                ["trial", "how", "steps", "a step: planned", "measured", "times"],
                list(map(_trial_cells, record["trials"])),
            ),
            "",
            *whole,
        ]
    )


def _device_cells(record: Mapping[str, Any]) -> list[str]:
    return [record["device"], *_pair(record, "{}_bytes", format_bytes)]


def _trial_cells(record: Mapping[str, Any]) -> list[str]:
    star = "*" if record["replanned"] else ""
    first = [str(record["trial"]), record["how"] + star, str(record["steps"])]
    return [*first, *_pair(record, "{}_step_s", format_seconds)]


def _pair(record: Mapping[str, Any], name: str, words: Callable[[Any], str]) -> Iterable[str]:
    """Planned, measured, and how many times the first the second is."""
    planned, measured = record[name.format("planned")], record[name.format("measured")]
    times = f"{measured / planned:.2f}" if planned and measured else DASH
    return (*(DASH if x is None else words(x) for x in (planned, measured)), times)
