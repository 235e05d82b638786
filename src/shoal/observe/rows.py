"""The rows of a snapshot: what is known of one trial and of one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from shoal.core.errors import last_words
from shoal.core.event import WorkerStalled
from shoal.core.spec import Scalar


class TrialState(StrEnum):
    """Where a trial is in its life."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"  # ended by hand or by a limit; can be extended
    PRUNED = "PRUNED"  # ended by the study's pruner, as others did better


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """One line of a learning curve: ``train_loss`` is the mean since the line before."""

    step: int
    epoch: int
    seconds: float
    metrics: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """A plain dict of the fields."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "seconds": self.seconds,
            "metrics": dict(self.metrics),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """A trial went on from the state that ``source`` had after ``step`` steps.

    ``before`` are its hyperparameters up to there, ``hp`` from there on.
    """

    step: int
    source: int
    before: Mapping[str, Scalar]
    hp: Mapping[str, Scalar]

    def to_dict(self) -> dict[str, Any]:
        """A plain dict of the fields."""
        known = {"step": self.step, "source": self.source}
        return known | {"before": dict(self.before), "hp": dict(self.hp)}

    @property
    def changes(self) -> dict[str, tuple[Scalar, Scalar]]:
        """The hyperparameters that are others now: before and after."""
        return changes(self.before, self.hp)


def changes(
    before: Mapping[str, Scalar], now: Mapping[str, Scalar]
) -> dict[str, tuple[Scalar, Scalar]]:
    """The hyperparameters whose values differ: each before and now."""
    names = (name for name in now if now[name] != before.get(name))
    return {name: (before.get(name), now[name]) for name in names}


class Replan(NamedTuple):
    """After ``step`` steps a trial got another plan, for a reason."""

    step: int
    reason: str


class TrainedWith(NamedTuple):
    """After ``step`` steps a trial trained with the study's recipe of this number, from 0."""

    step: int
    recipe: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One trial as a screen shows it.

    ``loss`` is the last step's, ``smooth_loss`` an exponential mean. ``metrics`` are
    the latest values, ``best`` the study's metric at its best so far. ``speed`` is
    optimizer steps per second of late, neighbours' time included. ``hp`` are those it has
    now; ``inherited`` is where it took over another trial's state, in order of steps; ``replans``
    where it turned out that it cannot train as it was planned to; ``ended`` is why a trial that
    was stopped or pruned was; ``recipes`` which of the study's recipes it trained with, where
    another one was accepted.
    """

    number: int
    hp: Mapping[str, Scalar] = field(default_factory=dict)
    seed: int = 0
    state: TrialState = TrialState.PENDING
    technique: str = ""
    shards: int = 0
    predicted_bytes: int = 0
    numerics: Mapping[str, Scalar] = field(default_factory=dict)
    why: tuple[str, ...] = ()  # it was planned so
    device: str = ""
    step: int = 0
    steps: int | None = None
    epoch: int = 0
    loss: float | None = None
    smooth_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: float | None = None
    speed: float | None = None
    seconds: float = 0.0
    restarts: int = 0
    error: str = ""
    ended: str = ""
    checkpoint: str = ""  # the newest generation, relative to the study's directory
    parent: int | None = None
    history: tuple[HistoryRow, ...] = ()
    inherited: tuple[Inherited, ...] = ()
    replans: tuple[Replan, ...] = ()
    recipes: tuple[TrainedWith, ...] = ()

    @property
    def error_line(self) -> str:
        """What went wrong, in a line: what a table has room for."""
        return last_words(self.error)

    @property
    def is_done(self) -> bool:
        """Whether no more steps will come."""
        return self.state not in (TrialState.PENDING, TrialState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """One device as a screen shows it.

    ``busy`` is the share of time in compute, from its first action to its last; None
    when no action was folded. ``speed`` is optimizer steps per second of late.
    """

    name: str
    kind: str = ""
    budget_bytes: int = 0
    peak_bytes: int = 0
    predicted_bytes: int = 0
    busy: float | None = None
    trials: tuple[int, ...] = ()
    speed: float | None = None
    restarts: int = 0
    stalled: WorkerStalled | None = None  # while it gets nothing done
