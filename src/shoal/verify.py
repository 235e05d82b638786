"""Train finished trials again, alone, with plain PyTorch, and compare every bit.

The recipe is imported from where the study came from; hyperparameters, seed, steps and
thread count are the trial's own, as recorded before its first step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import SpecError
from shoal.core.event import StepFinished
from shoal.observe.log import read_events
from shoal.observe.rows import TrialRow, TrialState, metric_rank
from shoal.observe.snapshot import Snapshot
from shoal.recipe import Recipe
from shoal.report import TrialResult, read_report
from shoal.source import load_study
from shoal.testing import PlainResult, compare, plain_loop


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialVerdict:
    """Whether one trial ended on the bits of the plain loop.

    ``tensors`` and ``losses`` are how many were compared; ``first_difference`` is in
    words, empty when there is none.
    """

    number: int
    steps: int
    tensors: int
    losses: int
    metrics: int
    first_difference: str
    plain_s: float

    @property
    def equal(self) -> bool:
        """Whether nothing differed."""
        return not self.first_difference


def choose_trials(snapshot: Snapshot, count: int, seed: int = 0) -> list[TrialRow]:
    """The best finished trial, and others drawn at random with ``seed``.

    Raises:
        SpecError: no trial finished, or ``count`` is less than one.
    """
    if count < 1:
        raise SpecError(f"verify at least one trial, got {count}.")
    finished = [row for row in snapshot.trials if row.state is TrialState.FINISHED]
    if not finished:
        raise SpecError(
            f"study {snapshot.study} has no finished trial to verify: "
            f"{snapshot.count(TrialState.FAILED)} failed, "
            f"{snapshot.count(TrialState.PENDING) + snapshot.count(TrialState.RUNNING)} not done."
        )

    def rank(row: TrialRow) -> tuple[float, int]:
        return metric_rank(row.metrics.get(snapshot.metric), snapshot.mode), row.number

    best, *others = sorted(finished, key=rank)
    drawn = random.Random(seed).sample(others, min(count - 1, len(others)))
    return [best, *drawn]


def verify_trials(
    place: Path,
    rows: Sequence[TrialRow],
    *,
    recipe: Recipe | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[TrialVerdict]:
    """Retrain each of ``rows`` in this process and compare; one verdict at a time.

    ``recipe`` is the one that trained the study; None imports it from the recorded file.

    Raises:
        SpecError: the study was made interactively, so that no file is on record.
    """
    source = Snapshot.of(read_events(place)).source
    recipe = recipe or _recorded_recipe(source)
    results = {trial.number: trial for trial in read_report(place, recipe).trials}
    losses = read_losses(place)
    for row in rows:
        started = clock()
        plain = plain_loop(recipe, row.hp, row.seed, steps=row.step, **_numerics(row))
        elapsed = clock() - started
        yield _judge(row, results[row.number], plain, losses.get(row.number, []), elapsed)


def read_losses(place: Path) -> dict[int, list[float]]:
    """The loss of every step by trial; a step that was done twice counts as done last."""
    found: dict[int, dict[int, float]] = {}
    for event in read_events(place):
        if isinstance(event, StepFinished):
            found.setdefault(event.trial, {})[event.step] = event.loss
    return {trial: [steps[n] for n in sorted(steps)] for trial, steps in found.items()}


def _judge(
    row: TrialRow, trial: TrialResult, plain: PlainResult, losses: list[float], plain_s: float
) -> TrialVerdict:
    found = compare(plain, trial.load_state(), losses=losses)
    expected = {n: v for n, v in plain.metrics.items() if n.startswith("valid_")}
    metrics = [
        f"metric {name!r}: {value!r} expected, {row.metrics.get(name)!r} found"
        for name, value in expected.items()
        if repr(row.metrics.get(name)) != repr(value)
    ]
    return TrialVerdict(
        number=row.number,
        steps=row.step,
        tensors=found.tensors,
        losses=len(losses),
        metrics=len(expected),
        first_difference=found.first_difference or next(iter(metrics), ""),
        plain_s=plain_s,
    )


def _recorded_recipe(source: str) -> Recipe:
    if not source:
        raise SpecError(
            "this study was made interactively, so no file says what its recipe is. Verify it "
            "from there: shoal.testing.plain_loop and shoal.testing.assert_same."
        )
    recipe: Recipe = load_study(source).study.recipe
    return recipe


def _numerics(row: TrialRow) -> dict[str, Any]:
    """What of the trial's numerics key the plain loop is told."""
    on_gpu = row.numerics.get("device", "cpu") != "cpu"
    return {
        "threads": int(row.numerics.get("threads") or 1),
        "device": "cuda" if on_gpu else "cpu",
        "optimizer": "host" if row.numerics.get("optimizer_place") == "host" else "device",
    }
