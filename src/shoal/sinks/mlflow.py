"""Metrics for MLflow: an experiment per study, and a run per trial.

[Note: what the runs are like]
They are as Optuna's and Ray's callbacks for MLflow make them: flat, without a run for the study.
A trial that was pruned is FINISHED there too, and a tag says PRUNED. KILLED are those that can
go on: stopped by hand or by a limit, or under way when their study was interrupted.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from datetime import UTC, datetime
from threading import TIMEOUT_MAX

from shoal.core.errors import SpecError
from shoal.core.event import Event, StudyFinished, StudyStarted, TrialPlanned
from shoal.observe.rows import TrialState
from shoal.observe.snapshot import Snapshot
from shoal.sinks.mlflowruns import Case, MLflow, Runs
from shoal.sinks.runchange import Change, change_of, change_of_row, unix_ms
from shoal.sinks.sender import Sender


class MLflowSink:
    """A callback that logs to MLflow, a server or a file of SQLite.

    ``study.run(callbacks=[MLflowSink("sqlite:///mlflow.db")])``, then
    ``mlflow ui --backend-store-uri sqlite:///mlflow.db``.

    Each trial is a run, ``trial-0003``: its hyperparameters are params, ``train_loss`` and every
    validation metric are metrics by step; tags ``shoal.*`` say its state, seed, technique,
    numerics key and newest checkpoint (relative to the study's directory). A value that changes
    while it trains (PBT) is a tag as well, since params cannot change. A pruned trial is FINISHED
    with ``shoal.state`` PRUNED; one that can go on is KILLED.

    A run is found again by ``shoal.study_id`` (the study's name and when it first began) and
    ``shoal.trial``. A step that is done again comes to the same numbers and is logged once. When
    a study is resumed, evaluations and states that a kill kept from MLflow are logged first.

    A thread of its own does the logging. Where it cannot, one warning says so and it tries again;
    ``dropped`` counts what it gave up. No training waits for it; the end of the study does, for
    ``wait_s`` at most.

    Args:
        uri: A tracking URI; MLflow's own if None (``MLFLOW_TRACKING_URI``).
        experiment: Its name; the study's if None.
        every: Log the training loss of every so many steps.
        wait_s: How long the end of a study waits for what is not logged yet.
        room: So many values are kept while MLflow is away or slow; more are dropped.

    Raises:
        SpecError: MLflow is not installed, or cannot use the place.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        experiment: str | None = None,
        every: int = 10,
        wait_s: float = 10.0,
        room: int = 100_000,
    ) -> None:
        for name, value in (("every", every), ("room", room)):
            if not isinstance(value, int) or value < 1:
                raise SpecError(f"MLflowSink({name}=...) is a whole number from 1, got {value!r}")
        if not isinstance(wait_s, int | float) or not 0 <= wait_s <= TIMEOUT_MAX:
            raise SpecError(f"MLflowSink(wait_s=...) is a number of seconds, got {wait_s!r}")
        self._mlflow = MLflow(None if uri is None else os.fspath(uri))
        self._experiment, self._every, self._wait_s, self._room = experiment, every, wait_s, room
        self._before = Snapshot()
        self._study, self._began = "", 0.0
        self._sender: Sender | None = None
        self._plans: dict[int, Change] = {}
        self._running: set[int] = set()
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """How many values were not logged, and will not be."""
        return self._dropped + (self._sender.dropped if self._sender is not None else 0)

    def look_back(self, before: Snapshot) -> None:
        """Keep what ran before: what MLflow lacks of it is logged first."""
        self.close()
        self._before = before
        if before.started is not None and before.is_finished and not before.stopped:
            self._study, self._began = before.study, before.started
            self._open()  # for no event may come
            self.close()

    def __call__(self, event: Event) -> None:
        """Leave what the event says to the thread, and warn of what became known there."""
        match event:
            case StudyStarted():
                self.close()
                self._plans.clear()
                self._study, self._began = event.study, self._before.started or event.time
            case TrialPlanned():  # its run begins when it does
                self._plans[event.trial] = change_of(event, self._every) or Change()
            case StudyFinished():
                for trial in sorted(self._running):
                    self._put(trial, Change(state=TrialState.PENDING, time=unix_ms(event.time)))
                self._open()
                self.close()
            case _:
                number, change = getattr(event, "trial", None), change_of(event, self._every)
                if number is not None and change is not None:
                    self._put(number, change)
        self._warn()

    def close(self) -> None:
        """Wait until all is logged, for ``wait_s`` at most; the next event opens it again."""
        sender, self._sender = self._sender, None
        if sender is None:
            return
        left = sender.close(self._wait_s)
        self._dropped += sender.dropped
        self._before = replace(self._before, trials=())
        self._running.clear()
        if left:
            warnings.warn(left, stacklevel=2)

    def _open(self) -> Sender:
        if self._sender is None:
            moment = datetime.fromtimestamp(self._began, UTC).isoformat()
            rows = [row for row in self._before.trials if row.step or row.is_done]
            case = Case(
                study=self._study,
                id=f"{self._study} {moment}",
                experiment=self._experiment or self._study,
                before={row.number: change_of_row(row, self._began) for row in rows},
            )
            self._sender = Sender(Runs(self._mlflow, case), room=self._room)
        return self._sender

    def _put(self, trial: int, change: Change) -> None:
        if change.state is TrialState.RUNNING:
            self._running.add(trial)
        elif change.state is not None:
            self._running.discard(trial)
        sender, plan = self._open(), self._plans.pop(trial, None)
        if plan is not None:  # at once, since a run has its beginning from when it is made
            change = replace(change, params=plan.params, tags={**plan.tags, **change.tags})
        sender.put(trial, change)

    def _warn(self) -> None:
        said = self._sender.trouble() if self._sender is not None else ""
        if said:
            warnings.warn(said, stacklevel=3)
