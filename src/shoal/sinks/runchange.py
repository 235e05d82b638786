"""What a trial's run in a tracker is told of an event: decided here, sent elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.core.errors import last_words
from shoal.core.event import (
    CheckpointWritten,
    Evaluated,
    Event,
    StepFinished,
    TrialExploited,
    TrialFailed,
    TrialFinished,
    TrialMoved,
    TrialPlanned,
    TrialPruned,
    TrialReplanned,
    TrialResumed,
    TrialStarted,
    TrialStopped,
)
from shoal.core.spec import Scalar
from shoal.observe.rows import TrialRow, TrialState

_ILLEGAL = re.compile(r"[^\w\-. /]", re.ASCII)  # MLflow's alphabet on every system
_LONGEST_NAME = 250
_ENDS = {
    TrialFinished: TrialState.FINISHED,
    TrialPruned: TrialState.PRUNED,
    TrialStopped: TrialState.STOPPED,
}


class Value(NamedTuple):
    """A metric at a step; ``time`` is Unix milliseconds."""

    name: str
    value: float
    time: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is new of one trial. ``state``: if it is another one, since ``time``, in ms.

    ``began`` is the first such moment, where there was an earlier one.
    """

    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    values: tuple[Value, ...] = ()
    state: TrialState | None = None
    time: int = 0
    began: int = 0


def change_of(event: Event, every: int) -> Change | None:
    """What the run of the event's trial is told, with every so many steps' losses."""
    match event:
        case TrialPlanned():
            tags = _planned(event.trial, event.seed, event.technique, event.shards)
            tags |= _numerics(event.numerics)
            tags |= {} if event.parent is None else {"parent": str(event.parent)}
            return Change(params=_params(event.hp), tags=tags)
        case StepFinished():
            return None if event.step % every else _values(event, {"train_loss": event.loss})
        case Evaluated():
            return _values(event, event.metrics)
        case TrialStarted() | TrialMoved() | TrialResumed():
            return Change(state=TrialState.RUNNING, time=unix_ms(event.time))
        case TrialReplanned():
            tags = {"technique": event.technique, "shards": str(event.shards)}
            return Change(tags=tags | (_numerics(event.numerics) if event.numerics else {}))
        case TrialExploited():
            return Change(tags=_taken_over(event.source, event.step, event.before, event.hp))
        case CheckpointWritten():
            return Change(tags={"checkpoint": event.path})
        case TrialFinished() | TrialPruned() | TrialStopped():
            state, tags = _ENDS[type(event)], {"checkpoint": event.checkpoint, "error": ""}
            return Change(state=state, time=unix_ms(event.time), tags=tags)
        case TrialFailed():
            tags = {"error": last_words(event.error)}
            return Change(state=TrialState.FAILED, time=unix_ms(event.time), tags=tags)
    return None


def change_of_row(row: TrialRow, began: float) -> Change:
    """What the run of a trial was told in earlier processes, its steps' losses left out.

    ``began``: when its study did. A row has a trial's own seconds, and times count from there.
    """
    tags = _planned(row.number, row.seed, row.technique, row.shards) | _numerics(row.numerics)
    tags |= {"checkpoint": row.checkpoint, "error": row.error_line}
    hp = row.hp
    if row.inherited:
        hp, last = row.inherited[0].before, row.inherited[-1]
        tags |= _taken_over(last.source, last.step, hp, last.hp)
    return Change(
        params=_params(hp),
        tags=tags,
        values=tuple(
            Value(_legal(name), value, unix_ms(began + line.seconds), line.step)
            for line in row.history
            for name, value in line.metrics.items()
            if name != "train_loss"  # of a line it is a mean
        ),
        state=row.state if row.is_done else TrialState.PENDING,
        time=unix_ms(began + max([row.seconds, *(line.seconds for line in row.history)])),
        began=unix_ms(began),
    )


@dataclass(slots=True)
class Waiting:
    """Changes of one trial that wait to be sent, as one."""

    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    state: TrialState | None = None
    time: int = 0
    began: int = 0

    def add(self, change: Change, room: int) -> int:
        """Take a change up, of its values the first ``room``; returns how many these are.

        Of two params the first stays, as in MLflow.
        """
        self.params = {**change.params, **self.params}
        self.tags.update(change.tags)
        values = change.values[: max(0, room)]
        self.values += values
        if change.state is not None:
            self.state, self.time = change.state, change.time
            self.began = self.began or change.began or change.time
        return len(values)

    def change(self) -> Change:
        """All of it."""
        return Change(
            params=self.params,
            tags=self.tags,
            values=tuple(self.values),
            state=self.state,
            time=self.time,
            began=self.began,
        )


def new_values(values: Iterable[Value], last: Mapping[str, Value]) -> list[Value]:
    """Those of steps after the ``last`` value of each metric, and each step once.

    None is earlier than the one before it: wall clocks jump, and some times are reckoned.
    """
    seen, new = dict(last), []
    for value in values:
        before = seen.get(value.name)
        if before is not None and value.step <= before.step:
            continue
        if before is not None and value.time < before.time:
            value = value._replace(time=before.time)
        seen[value.name] = value
        new.append(value)
    return new


def _values(event: StepFinished | Evaluated, metrics: Mapping[str, float]) -> Change:
    time = unix_ms(event.time)
    values = tuple(Value(_legal(n), float(v), time, event.step) for n, v in metrics.items())
    return Change(values=values, state=TrialState.RUNNING, time=time)


def _planned(trial: int, seed: int, technique: str, shards: int) -> dict[str, str]:
    known = {"trial": trial, "seed": seed, "technique": technique, "shards": shards}
    return {name: str(value) for name, value in known.items()}


def _numerics(key: Mapping[str, Scalar]) -> dict[str, str]:
    return {"numerics": json.dumps(dict(key))}


def _taken_over(
    source: int, step: int, before: Mapping[str, Scalar], hp: Mapping[str, Scalar]
) -> dict[str, str]:
    """Params cannot change, so that hyperparameters which do are tags."""
    new = {_legal(f"hp.{n}"): str(v) for n, v in hp.items() if v != before.get(n)}
    return {"source": f"trial {source} at step {step}"} | new


def _params(hp: Mapping[str, Scalar]) -> dict[str, str]:
    return {_legal(name): str(value) for name, value in hp.items()}


def _legal(name: str) -> str:
    return _ILLEGAL.sub("_", name)[:_LONGEST_NAME]


def unix_ms(seconds: float) -> int:
    """A moment as MLflow has it."""
    return int(seconds * 1000)
