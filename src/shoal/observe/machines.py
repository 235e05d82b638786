"""One trial and one device while their events are folded: what ``snapshot`` adds up.

The rules are in [Note: folding] of that file. ``now`` and all seconds here are of the
study's clock, which stands still between runs.
"""

from __future__ import annotations

import copy
import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.core.aim import Aim, metric_rank
from shoal.core.event import (
    ActionFinished,
    Evaluated,
    StepFinished,
    TrialExploited,
    TrialFinished,
    TrialPlanned,
    TrialPruned,
    TrialReplanned,
    TrialStopped,
    WorkerStalled,
)
from shoal.core.seats import OTHERS_PRUNED
from shoal.core.spec import Scalar
from shoal.observe.rows import (
    DeviceRow,
    HistoryRow,
    Inherited,
    Replan,
    TrainedWith,
    TrialRow,
    TrialState,
)

_RECENT_STEPS = 64  # speeds are over so many steps
_SMOOTHING = 0.9  # of the exponential mean of the loss
_REMEMBERED = 1024  # losses that show in it: of an older one less than a digit is left


class TrialFold:
    """A trial while it is folded. ``steps`` and ``losses`` run in parallel."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.plan: TrialPlanned | None = None
        self.state = TrialState.PENDING
        self.device = ""
        self.step = self.epoch = self.restarts = 0
        self.steps, self.losses = array("q"), array("d")
        self.smooth_loss: float | None = None
        self.history: list[HistoryRow] = []
        self.inherited: list[Inherited] = []
        self.replans: list[Replan] = []
        self.recipes: list[TrainedWith] = []
        self.evaluations: list[int] = []  # their steps; while there are none, rows are by epoch
        self.metrics: dict[str, float] = {}
        self.best: float | None = None
        self.began: float | None = None  # on the study's clock
        self.seconds = 0.0
        self.recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.step_s: float | None = None
        self.error = self.ended = ""
        self.saved = ""  # the newest generation of its state
        self.cached: TrialRow | None = None

    @property
    def is_done(self) -> bool:
        return self.state not in (TrialState.PENDING, TrialState.RUNNING)

    def reopen(self) -> None:
        """It was planned to go on: a trial that had ended waits again."""
        if self.is_done:
            self.state, self.device = TrialState.PENDING, ""
            self.error = self.ended = ""

    def plan_as(self, event: TrialPlanned) -> None:
        self.plan = event
        if not self.recipes or self.recipes[-1].recipe != event.recipe:
            self.recipes.append(TrainedWith(self.step, event.recipe))
            self._forget_recipes(self.step)
        self.reopen()

    def _forget_recipes(self, step: int) -> None:
        """What is done after ``step`` is done with the recipe that it has now."""
        if self.recipes and self.recipes[-1].step >= step:
            before = [one for one in self.recipes[:-1] if one.step < step]
            self.recipes = [*before, self.recipes[-1]._replace(step=step)]

    def replan(self, event: TrialReplanned) -> None:
        if not event.reason.startswith(OTHERS_PRUNED):
            self.replans.append(Replan(event.step, event.reason))
        if self.plan is not None:
            self.plan = replace(
                self.plan,
                technique=event.technique,
                shards=event.shards,
                peak_bytes=event.peak_bytes,
                numerics=self.plan.numerics if event.numerics is None else event.numerics,
            )

    def copy(self) -> TrialFold:
        other = copy.copy(self)
        other.steps, other.losses = self.steps[:], self.losses[:]
        other.history, other.metrics = self.history[:], dict(self.metrics)
        other.inherited, other.replans = self.inherited[:], self.replans[:]
        other.recipes = self.recipes[:]
        other.evaluations = self.evaluations[:]
        other.recent = self.recent.copy()
        return other

    def lease(self, device: str, now: float) -> None:
        self.state, self.device = TrialState.RUNNING, device
        self.error = self.ended = ""
        self.recent.clear()
        if self.began is None:
            self.began = now - self.seconds  # of earlier runs

    def release(self) -> None:
        """No worker has it: until it starts again it waits."""
        self.cached = None
        if self.state is TrialState.RUNNING:
            self.state, self.device = TrialState.PENDING, ""
        self.recent.clear()

    def stand_still(self) -> None:
        """A run begins, which first plans: its time goes on when it trains again."""
        self.release()
        if not self.is_done:
            self.began = None

    def finish_step(self, event: StepFinished, aim: Aim) -> None:
        if self.steps and self.steps[-1] >= event.step:
            self.rewind(event.step - 1, aim)
        if self.steps and event.epoch > self.epoch and not self.evaluations:
            self.add_row(self.step, self.epoch, {}, aim)
        self.steps.append(event.step)
        self.losses.append(event.loss)
        self.step, self.epoch = event.step, event.epoch
        self.smooth_loss = _smooth(self.smooth_loss, event.loss)
        self.recent.append(event.time)
        self.step_s = event.seconds

    def rewind(self, step: int, aim: Aim) -> None:
        """Forget what happened after ``step``: it will happen again."""
        kept = bisect_right(self.steps, step)
        del self.steps[kept:], self.losses[kept:]
        self.evaluations = [at for at in self.evaluations if at <= step]
        self.step = min(self.step, step)
        self.smooth_loss = self._smoothed()
        self._disinherit(step)
        self._forget_recipes(step)
        self._keep_rows([row for row in self.history if row.step <= step], aim)

    def _smoothed(self) -> float | None:
        """The mean after the steps that are left; of an outline, which has none of them, as it was
        last."""
        if not self.losses and self.step:
            return self.smooth_loss
        mean: float | None = None
        for loss in self.losses[-_REMEMBERED:]:
            mean = _smooth(mean, loss)
        return mean

    def inherit(self, event: TrialExploited) -> None:
        """It goes on from another one's state; done again it counts as done last."""
        self.inherited = [one for one in self.inherited if one.step < event.step]
        taken = Inherited(step=event.step, source=event.source, before=event.before, hp=event.hp)
        self.inherited.append(taken)
        self.saved = event.checkpoint
        self._change(event.hp)

    def _disinherit(self, step: int) -> None:
        """What was taken over after ``step`` will be taken over again."""
        lost = [one for one in self.inherited if one.step > step]
        if lost:
            self.inherited = self.inherited[: -len(lost)]
            self._change(lost[0].before)

    def _change(self, hp: Mapping[str, Scalar]) -> None:
        if self.plan is not None:
            self.plan = replace(self.plan, hp=hp)

    def evaluate(self, event: Evaluated, aim: Aim) -> None:
        """A row of the learning curve; the first one replaces those by epoch."""
        earlier = [row for row in self.history if row.step <= event.step]
        if not self.evaluations or len(earlier) < len(self.history):
            self._keep_rows(earlier if self.evaluations else [], aim)
        self.evaluations.append(event.step)
        self.add_row(event.step, event.epoch, event.metrics, aim)

    def add_row(self, step: int, epoch: int, metrics: Mapping[str, float], aim: Aim) -> None:
        row = HistoryRow(step=step, epoch=epoch, seconds=self.seconds, metrics=dict(metrics))
        if self.history and self.history[-1].step == step:
            older = self.history.pop()
            row = replace(row, metrics={**older.metrics, **metrics})
        else:
            row = replace(row, metrics={**self._train_loss(step), **metrics})
        self.history.append(row)
        self._see(row.metrics, aim)

    def finish(
        self, event: TrialFinished | TrialStopped | TrialPruned, aim: Aim, state: TrialState
    ) -> None:
        self.step = event.step
        is_evaluated = state is not TrialState.STOPPED  # which may be between two evaluations
        if is_evaluated and (not self.history or self.history[-1].step < event.step):
            self.add_row(event.step, self.epoch, event.metrics, aim)
            self._see(event.metrics, aim)
        self.state, self.saved = state, event.checkpoint
        self.ended = "" if isinstance(event, TrialFinished) else event.reason
        self.seconds = max(self.seconds, event.seconds)  # the event knows of this run alone

    def row(self) -> TrialRow:
        if self.cached is None:
            self.cached = self._row()
        return self.cached

    def _row(self) -> TrialRow:
        plan = self.plan
        row = TrialRow(
            number=self.number,
            state=self.state,
            device=self.device,
            step=self.step,
            epoch=self.epoch,
            loss=self.losses[-1] if self.losses else None,
            smooth_loss=self.smooth_loss,
            metrics=dict(self.metrics),
            best=self.best,
            speed=_speed(self.recent, self.step_s),
            seconds=self.seconds,
            restarts=self.restarts,
            error=self.error,
            ended=self.ended,
            checkpoint=self.saved,
            parent=plan.parent if plan else None,
            history=tuple(self.history),
            inherited=tuple(self.inherited),
            replans=tuple(self.replans),
            recipes=tuple(self.recipes),
        )
        if plan is None:
            return row
        return replace(
            row,
            hp=plan.hp,
            seed=plan.seed,
            technique=plan.technique,
            shards=plan.shards,
            steps=plan.steps,
            predicted_bytes=plan.peak_bytes,
            numerics=plan.numerics,
            why=plan.why,
        )

    def _train_loss(self, step: int) -> dict[str, float]:
        """The mean loss of the steps since the last row, up to ``step``."""
        after = self.history[-1].step if self.history else 0
        first, stop = bisect_right(self.steps, after), bisect_right(self.steps, step)
        losses = self.losses[first:stop]
        return {"train_loss": sum(losses) / len(losses)} if losses else {}

    def _see(self, metrics: Mapping[str, float], aim: Aim) -> None:
        self.metrics.update(metrics)
        value = metrics.get(aim.metric)
        if metric_rank(value, aim.mode) < metric_rank(self.best, aim.mode):
            self.best = value

    def _keep_rows(self, rows: list[HistoryRow], aim: Aim) -> None:
        self.history, self.metrics, self.best = rows, {}, None
        for row in rows:
            self._see(row.metrics, aim)


class WorkFold:
    """The study's time from its first action to its last, of each of its runs."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._spans: dict[int, tuple[float, float]] = {}  # by how many runs had begun

    def copy(self) -> WorkFold:
        other = WorkFold()
        other._begins, other._spans = self._begins[:], dict(self._spans)
        return other

    def begin(self, time: float) -> None:
        """A run begins."""
        self._begins.append(time)

    def add(self, event: ActionFinished) -> None:
        run = bisect_right(self._begins, event.start)
        first, last = self._spans.get(run, (event.start, event.end))
        self._spans[run] = min(first, event.start), max(last, event.end)

    @property
    def seconds(self) -> float:
        return sum(last - first for first, last in self._spans.values())


class DeviceFold:
    """A device while it is folded."""

    def __init__(self, name: str) -> None:
        self.name, self.kind = name, ""
        self.budget_bytes = self.peak_bytes = self.predicted_bytes = self.restarts = 0
        self.recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.step_s: float | None = None
        self.compute_s = 0.0
        self.stalled: WorkerStalled | None = None

    def copy(self) -> DeviceFold:
        other = copy.copy(self)
        other.recent = self.recent.copy()
        return other

    def describe(self, spec: Mapping[str, Any]) -> None:
        self.kind = str(spec.get("kind", ""))
        memory = int(spec.get("memory", 0))
        if memory != self.budget_bytes:  # what an earlier run held says nothing of this one
            self.peak_bytes = self.predicted_bytes = 0
        self.budget_bytes = memory

    def add_action(self, event: ActionFinished) -> None:
        if event.stream == "compute":
            self.compute_s += event.end - event.start

    def row(self, trials: tuple[int, ...], span: float) -> DeviceRow:
        """``span``: the seconds in which the study's devices were at work."""
        return DeviceRow(
            name=self.name,
            kind=self.kind,
            budget_bytes=self.budget_bytes,
            peak_bytes=self.peak_bytes,
            predicted_bytes=self.predicted_bytes,
            busy=self.compute_s / span if span > 0 else None,
            trials=trials,
            speed=_speed(self.recent, self.step_s),
            restarts=self.restarts,
            stalled=self.stalled,
        )


def _smooth(mean: float | None, loss: float) -> float:
    if mean is None or not math.isfinite(mean):
        return loss
    return _SMOOTHING * mean + (1 - _SMOOTHING) * loss


def _speed(times: deque[float], step_s: float | None) -> float | None:
    """Steps per second between the recent ends of steps; of one step alone, its own."""
    if len(times) > 1 and times[-1] > times[0]:
        return (len(times) - 1) / (times[-1] - times[0])
    return 1 / step_s if times and step_s else None
