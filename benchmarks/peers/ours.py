"""shoal's arms: the task as a study of one trial or of several on one device."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import processes
from pace import Ended, pace, used_at
from task import Task

import shoal
from shoal.core.event import Event, PeakMeasured, StepFinished, WorkerStarted
from shoal.core.plan import Job, Plan
from shoal.core.technique import Spilled
from shoal.core.units import parse_bytes
from shoal.planning import deciding
from shoal.runtime.pool import WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """An arm: where the optimizer steps, and whether there are several trials, all at a time."""

    optimizer: Literal["host", "device"]
    several: bool = False


ARMS = {
    "shoal, step on the host": Ours(optimizer="host"),
    "shoal, step on the device": Ours(optimizer="device"),
    "shoal, several trials at a time": Ours(optimizer="host", several=True),
}


def budget_of(task: Task) -> int:
    """As the task says; else a quarter of parameters, gradients and AdamW's moments, in bytes."""
    if task.budget:
        return parse_bytes(task.budget)
    return 16 * task.parameters() // 4


class Watch:
    """Events of a study: ends of steps, losses, the device's peak, memory at the start."""

    def __init__(self, trials: int) -> None:
        self._times: dict[int, list[float]] = {trial: [] for trial in range(trials)}
        self._read: list[Ended] = []  # when an event arrived, and CPU seconds until then
        self.losses: dict[int, list[float]] = {trial: [] for trial in range(trials)}
        self.pid: int | None = None
        self.before_bytes = processes.own_bytes()
        self.peak: PeakMeasured | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, WorkerStarted):
            self.pid = event.pid
            _, *others = processes.family(os.getpid())
            self.before_bytes += sum(map(processes.own_bytes, others))
        if isinstance(event, PeakMeasured):
            self.peak = event
        if isinstance(event, StepFinished):
            self._times[event.trial].append(event.time)
            self._read.append(Ended(time.time(), self._cpu_s()))
            self.losses[event.trial].append(event.loss)

    def ended(self) -> dict[int, list[Ended]]:
        """The ends of each trial's steps. CPU time was read a little before and after each."""
        return {
            trial: [Ended(at, used_at(self._read, at)) for at in times]
            for trial, times in self._times.items()
        }

    def _cpu_s(self) -> float:
        """Of the study's process and of its worker."""
        return processes.cpu_seconds() + (processes.cpu_seconds(self.pid) if self.pid else 0.0)


def train(task: Task, arm: Ours) -> dict[str, Any]:
    """One study; its figures are those that ``arm.py`` gives of a peer."""
    trials = task.trials if arm.several else 1
    watch = Watch(trials)
    forced = _forced(trials) if arm.several else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as directory, WorkerPool() as pool, forced:
        study = shoal.Study(
            "peers",
            task.recipe(),
            space=shoal.grid(
                seed=list(range(trials)), lr=[task.lr], weight_decay=[task.weight_decay]
            ),
            steps=task.all_steps,
            metric="train_loss",
            directory=directory,
        )
        study.run(
            hardware=_hardware(task),
            technique=Spilled(optimizer=arm.optimizer),
            callbacks=[watch],
            progress=False,
            workers=pool,
        )
        plan = Plan.from_json((Path(directory) / "peers" / "plan.json").read_text())
    return _figures(task, watch, plan)


def _figures(task: Task, watch: Watch, plan: Plan) -> dict[str, Any]:
    job, ended, found = plan.jobs[0], watch.ended(), {}
    if task.warm_up:  # else one step was taken, to see how soon
        found = pace(ended, task.warm_up)._asdict()
    assert watch.peak is not None
    return {
        **found,
        "first_step_at": min(ends[0].time_s for ends in ended.values()),
        "losses": {str(trial): losses for trial, losses in watch.losses.items()},
        "before_bytes": watch.before_bytes,
        "device_peak_bytes": watch.peak.peak_bytes,
        "host_bytes": job.host_bytes,
        "budget_bytes": watch.peak.budget_bytes,
        "at_a_time": plan.active,
        **_chosen(job),
    }


def _chosen(job: Job) -> dict[str, Any]:
    technique = job.technique
    assert isinstance(technique, Spilled)
    return {
        "shards": len(job.shards),
        "lookahead": technique.lookahead,
        "kept": len(technique.keep or ()),
        "weights_kept": len(technique.keep_weights),
        "boundaries": technique.boundaries,
    }


def _hardware(task: Task) -> shoal.Hardware:
    on_cpu = task.device == "cpu"
    return shoal.Hardware.parse(
        "cpu:1" if on_cpu else task.device,
        budget_of(task),
        threads=task.threads if on_cpu else None,
    )


@contextlib.contextmanager
def _forced(at_a_time: int) -> Iterator[None]:
    """Inside, the planner may only choose among plans with so many trials at a time.

    There is no public option for that: the planner has several where it expects them to pay.
    """
    choices = deciding.choices

    @functools.wraps(choices)
    def only(measure: Any, budget: Any, actives: Any, *rest: Any) -> Any:
        return choices(measure, budget, (at_a_time,), *rest)

    with mock.patch.object(deciding, "choices", only):
        yield
