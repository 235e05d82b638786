"""An MLflow that keeps its runs in memory, and a study's events to log there."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.core.event import (
    CheckpointWritten,
    Evaluated,
    Event,
    StepFinished,
    StudyFinished,
    StudyStarted,
    TrialFinished,
    TrialPlanned,
    TrialStarted,
)
from shoal.observe.snapshot import Snapshot
from shoal.sinks import MLflowSink


class Away(Exception):
    """A server that does not answer."""


class Refused(Exception):
    def get_http_status_code(self) -> int:
        return 400


class Pair(NamedTuple):
    key: str
    value: str


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Page(list[Any]):
    token: str | None = None


@dataclass
class Run:
    info: types.SimpleNamespace
    tags: dict[str, str]
    params: dict[str, str] = field(default_factory=dict)
    values: list[Metric] = field(default_factory=list)

    @property
    def data(self) -> types.SimpleNamespace:
        newest = {metric.key: metric for metric in sorted(self.values, key=lambda m: m.step)}
        proto = types.SimpleNamespace(metrics=list(newest.values()))
        return types.SimpleNamespace(
            params=self.params, tags=self.tags, metrics=newest, to_proto=lambda: proto
        )


class Server:
    """Experiments and runs; ``troubles`` are called with each request before it is heeded."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, Run] = {}
        self.requests: list[str] = []
        self.trouble: Callable[[str], None] = lambda name: None

    def client(self, tracking_uri: str) -> Server:
        self.requested("client")
        return self

    def requested(self, name: str) -> None:
        self.requests.append(name)
        self.trouble(name)

    def get_experiment_by_name(self, name: str) -> Any:
        self.requested("get_experiment_by_name")
        number = self.experiments.get(name)
        return number and types.SimpleNamespace(experiment_id=number)

    def create_experiment(self, name: str) -> str:
        self.requested("create_experiment")
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def search_runs(self, experiments: list[str], asked: str, page_token: str | None) -> Page:
        """A page of two runs, the newest first."""
        self.requested("search_runs")
        wanted = asked.removeprefix("tags.`shoal.study_id` = '").removesuffix("'")
        found = [r for r in self.runs.values() if r.tags["shoal.study_id"] == wanted][::-1]
        start = int(page_token or 0)
        page = Page(r for r in found[start : start + 2] if r.info.experiment_id in experiments)
        page.token = str(start + 2) if start + 2 < len(found) else None
        return page

    def create_run(self, experiment: str, start_time: int, tags: Any, run_name: str) -> Run:
        number = f"run{len(self.runs)}"
        info = types.SimpleNamespace(run_id=number, experiment_id=experiment, run_name=run_name)
        info.status, info.start_time, info.end_time = "RUNNING", start_time, None
        self.runs[number] = Run(info, dict(tags))
        self.requested("create_run")  # what fails here was done, and not answered
        return self.runs[number]

    def log_batch(self, run: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        assert len(metrics) <= 1000
        assert len(params) <= 100
        assert len(tags) <= 100
        self.requested("log_batch")
        kept = self.runs[run]
        for pair in params:
            assert kept.params.setdefault(*pair) == pair.value, "params cannot change"
        kept.tags.update(tags)
        kept.values += [metric for metric in metrics if metric not in kept.values]

    def update_run(self, run: str, status: str) -> None:
        self.requested("update_run")
        self.runs[run].info.status = status

    def set_terminated(self, run: str, status: str, end_time: int) -> None:
        self.requested("set_terminated")
        self.runs[run].info.status, self.runs[run].info.end_time = status, end_time

    def get_metric_history(self, run: str, key: str) -> list[Metric]:
        return [metric for metric in self.runs[run].values if metric.key == key]


@dataclass
class Store:
    """A place to log to, as MLflow's own client reads it."""

    uri: str
    server: Server | None

    def runs(self, experiment: str = "lr") -> dict[str, Any]:
        client = self.server or sys.modules["mlflow"].MlflowClient(tracking_uri=self.uri)
        if self.server is not None:
            found = list(self.server.runs.values())
        else:
            number = client.get_experiment_by_name(experiment).experiment_id
            found = list(client.search_runs([number]))
        for run in found:
            names = run.data.metrics
            run.history = {
                name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
                for name in names
            }
        named = {run.info.run_name: run for run in found}
        assert len(named) == len(found), "a trial has one run"
        return named


BEGAN = 1_700_000_000.0


def started(time: float = BEGAN) -> StudyStarted:
    nothing: Any = {}
    return StudyStarted(
        time=time,
        study="lr",
        metric="valid_loss",
        mode="min",
        trials=2,
        devices=(),
        source="",
        versions=nothing,
    )


def planned(trial: int, **hp: Any) -> TrialPlanned:
    return TrialPlanned(
        time=BEGAN + 1,
        trial=trial,
        hp=hp or {"lr": 0.5, "norm": None},
        seed=40 + trial,
        technique="Resident",
        shards=1,
        steps=4,
        peak_bytes=1,
        numerics={"torch": "2.13.0"},
    )


def begun(trial: int) -> TrialStarted:
    return TrialStarted(time=BEGAN + 2, trial=trial, device="cpu:0")


def step(trial: int, number: int) -> StepFinished:
    return StepFinished(
        time=BEGAN + 10 + number,
        trial=trial,
        step=number,
        epoch=1,
        loss=float(number),
        seconds=0.5,
        device="cpu:0",
    )


def evaluated(trial: int, number: int, **metrics: float) -> Evaluated:
    metrics = metrics or {"valid_loss": number / 10}
    time = BEGAN + 10 + number
    return Evaluated(time=time, trial=trial, step=number, epoch=1, metrics=metrics)


def steps(trial: int, first: int, last: int) -> list[Event]:
    """Steps, and an evaluation after every second one."""
    events: list[Event] = []
    for number in range(first, last + 1):
        events.append(step(trial, number))
        if number % 2 == 0:
            events.append(evaluated(trial, number))
    return events


def saved(trial: int, number: int) -> CheckpointWritten:
    path = f"trials/{trial:04d}/step-{number:08d}"
    return CheckpointWritten(
        time=BEGAN + 10 + number, trial=trial, step=number, path=path, bytes=1, seconds=0.1
    )


def finished(trial: int, number: int) -> TrialFinished:
    return TrialFinished(**ended(trial, number))


def ended(trial: int, number: int) -> dict[str, Any]:
    known = {"time": BEGAN + 90, "trial": trial, "step": number, "metrics": {}, "seconds": 1.0}
    return known | {"checkpoint": f"trials/{trial:04d}/step-{number:08d}"}


def over(stopped: str = "") -> StudyFinished:
    return StudyFinished(time=BEGAN + 99, finished=1, failed=0, seconds=9.0, stopped=stopped)


def give(sink: MLflowSink, events: Iterable[Event]) -> MLflowSink:
    for event in events:
        sink(event)
    return sink


def resumed(store: Store, before: Iterable[Event], **options: Any) -> MLflowSink:
    """The sink of another process, as a study that ran before gives it its past."""
    sink = MLflowSink(store.uri, **options)
    sink.look_back(Snapshot.of(before))
    return sink
