"""Runs in MLflow: found again or made, and told what is new.

[Note: what a kill and a lost answer leave]
A run is made together with the tags by which it is found again. Whatever fails is asked anew from
the search on, so that a run whose making was not answered is found. Values that were sent once
and are sent again have the same times, and MLflow's databases keep one of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.core.errors import SpecError
from shoal.observe.rows import TrialState
from shoal.sinks.runchange import Change, Value, new_values

_VALUES, _NAMES = 900, 50  # in a request, which may hold 1000, 100 and a megabyte
_LONGEST_PARAM, _LONGEST_TAG = 6000, 5000
_LOCAL = re.compile(r"(sqlite|file):|(?!\w[\w+.-]*:)", re.IGNORECASE)
_TEMPORARY = (401, 403, 408, 425, 429)  # of the answers from 400 to 499
_STATUS = {
    TrialState.PENDING: "KILLED",
    TrialState.RUNNING: "RUNNING",
    TrialState.FINISHED: "FINISHED",
    TrialState.FAILED: "FAILED",
    TrialState.STOPPED: "KILLED",
    TrialState.PRUNED: "FINISHED",
}


class MLflow:
    """What is needed of MLflow, imported when a sink is made: it is an extra.

    Raises:
        SpecError: it is not there, or cannot use a place on this machine.
    """

    def __init__(self, uri: str | None) -> None:
        try:
            import mlflow
            from mlflow import MlflowClient, entities
        except ImportError as error:
            raise SpecError(
                f"MLflowSink needs MLflow, which cannot be imported here ({error}). "
                "Install it: pip install mlflow."
            ) from None
        self.entities: Any = entities
        self._make, self._uri = MlflowClient, str(uri or mlflow.get_tracking_uri())
        self._client: Any = None
        if _LOCAL.match(self._uri):
            try:
                self.client()
            except Exception as error:  # whatever a store raises
                raise SpecError(
                    f"MLflowSink cannot use {self.place}: {type(error).__name__}: {error}"
                ) from None

    @property
    def place(self) -> str:
        """The tracking URI, without a password."""
        return re.sub(r"//[^@/]*@", "//", self._uri)

    def client(self) -> Any:
        """The client; that of a database far away connects when it is made."""
        if self._client is None:
            self._client = self._make(tracking_uri=self._uri)
        return self._client


@dataclass(slots=True)
class _Run:
    """What MLflow has of a trial; ``last`` is the newest value of each metric."""

    id: str
    status: str = "RUNNING"
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    last: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The study that is logged, in which experiment, and what was told before this process."""

    study: str
    id: str
    experiment: str
    before: Mapping[int, Change] = field(default_factory=dict)


class Runs:
    """The runs of a study; called from one thread. Whatever MLflow raises comes through.

    ``refused`` counts the values that it will take in no other try either.
    """

    def __init__(self, mlflow: MLflow, case: Case) -> None:
        self._mlflow, self._case = mlflow, case
        self._experiment = ""
        self._runs: dict[int, _Run] | None = None
        self.refused, self.why = 0, ""

    @property
    def place(self) -> str:
        """Where they are, in words."""
        return self._mlflow.place

    @property
    def lacking(self) -> tuple[int, ...]:
        """The trials whose runs were not told yet what happened in earlier processes."""
        return tuple(self._case.before)

    def open(self) -> None:
        """Find the experiment and its runs, and tell these what they lack."""
        if self._runs is None:
            self._experiment = self._find_experiment()
            self._runs = {int(r.tags["shoal.trial"]): r for r in self._find()}
            for trial, change in self._case.before.items():
                self.tell(trial, change)
            self._case = replace(self._case, before={})

    def forget(self) -> None:
        """Look for all runs again: it is not known what became of the last request."""
        self._runs = None

    def tell(self, trial: int, change: Change) -> None:
        """Bring a trial's run up to a change."""
        assert self._runs is not None
        run = self._runs.get(trial)
        if run is None:
            run = self._runs[trial] = self._make(trial, change)
        values = new_values(change.values, run.last)
        try:
            self._log(run, change, values)
        except Exception as error:
            if not _is_final(error):
                raise
            self.refused += len(values) or 1
            self.why = f"{type(error).__name__}: {error}"

    def _find_experiment(self) -> str:
        client, name = self._mlflow.client(), self._case.experiment
        found = client.get_experiment_by_name(name)
        return str(found.experiment_id if found else client.create_experiment(name))

    def _find(self) -> Iterator[_Run]:
        """The newest first, so that of two the older one counts."""
        client, token = self._mlflow.client(), None
        asked = f"tags.`shoal.study_id` = '{self._case.id}'"
        while True:
            page = client.search_runs([self._experiment], asked, page_token=token)
            for found in page:
                data, info = found.data, found.info
                newest = data.to_proto().metrics  # with their steps, unlike data.metrics
                last = {m.key: Value(m.key, m.value, m.timestamp, m.step) for m in newest}
                yield _Run(info.run_id, info.status, dict(data.params), dict(data.tags), last)
            token = page.token
            if not token:
                return

    def _make(self, trial: int, change: Change) -> _Run:
        tags = {"study": self._case.study, "study_id": self._case.id, "trial": str(trial)}
        tags = {f"shoal.{name}": value for name, value in tags.items()}
        name, began = f"trial-{trial:04d}", change.began or change.time or None
        made = self._mlflow.client().create_run(
            self._experiment, start_time=began, tags=tags, run_name=name
        )
        return _Run(made.info.run_id, tags=tags)

    def _log(self, run: _Run, change: Change, values: list[Value]) -> None:
        client, kinds = self._mlflow.client(), self._mlflow.entities
        for some in _pieces(_params(run, change)):
            client.log_batch(run.id, params=[kinds.Param(*pair) for pair in some.items()])
            run.params.update(some)
        for at in range(0, len(values), _VALUES):
            part = values[at : at + _VALUES]
            client.log_batch(run.id, metrics=[kinds.Metric(*value) for value in part])
            run.last.update((value.name, value) for value in part)
        for some in _pieces(_tags(run, change)):
            client.log_batch(run.id, tags=[kinds.RunTag(*pair) for pair in some.items()])
            run.tags.update(some)
        self._set_status(run, change)

    def _set_status(self, run: _Run, change: Change) -> None:
        status = run.status if change.state is None else _STATUS[change.state]
        if status == run.status:
            return
        if status == "RUNNING":
            self._mlflow.client().update_run(run.id, status=status)
        else:
            self._mlflow.client().set_terminated(run.id, status, change.time)
        run.status = status


def _params(run: _Run, change: Change) -> dict[str, str]:
    """Those that are new: MLflow takes no other value for one that it has."""
    return {n: v[:_LONGEST_PARAM] for n, v in change.params.items() if n not in run.params}


def _tags(run: _Run, change: Change) -> dict[str, str]:
    """Those that are others now."""
    tags = {f"shoal.{name}": value[:_LONGEST_TAG] for name, value in change.tags.items()}
    if change.state is not None:
        tags["shoal.state"] = change.state.value
    return {name: value for name, value in tags.items() if value != run.tags.get(name, "")}


def _is_final(error: Exception) -> bool:
    """Whether MLflow says no, and will say so again; a store that is away says nothing."""
    code = getattr(error, "get_http_status_code", lambda: 500)()
    return 400 <= code < 500 and code not in _TEMPORARY


def _pieces(names: Mapping[str, str]) -> Iterator[dict[str, str]]:
    pairs = [*names.items()]
    for at in range(0, len(pairs), _NAMES):
        yield dict(pairs[at : at + _NAMES])
