"""What a study has on record for a comparison: its recipe's file, and its trials' curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import SpecError
from shoal.core.event import Evaluated, StepFinished
from shoal.observe.reader import read_events, read_trial
from shoal.observe.rows import TrialRow, TrialState
from shoal.observe.snapshot import Snapshot
from shoal.recipes.named import recall_recipe
from shoal.recipes.recipe import Recipe
from shoal.source import load_recorded, load_study, reading_for


def recorded_study(place: Path, snapshot: Snapshot, file: str | None) -> Any:
    """The ``shoal.Study`` of the file that a study came from, or of ``file`` if that moved.

    Raises:
        SpecError: no file is on record, or it is not there any more.
    """
    if file is not None:
        with reading_for(snapshot.study):
            return load_study(file, snapshot.arguments).study
    _check_source(snapshot)
    return load_recorded(snapshot.source, place, snapshot.study, snapshot.arguments).study


def recorded_recipe(place: Path, snapshot: Snapshot, file: str | None) -> tuple[Recipe, bool]:
    """A study's recipe, and whether its trials' length was given in epochs.

    Raises:
        SpecError: nothing says what it is, or that is not there any more.
    """
    if file is None and not snapshot.source and snapshot.recipe:
        recipe = recall_recipe(snapshot.recipe, place, snapshot.study, snapshot.arguments)
        return recipe, snapshot.by_epochs
    study = recorded_study(place, snapshot, file)
    return study.recipe, study.epochs is not None


def _check_source(snapshot: Snapshot) -> None:
    if not snapshot.source:
        raise SpecError(
            "this study was made interactively, or in a function of functions without a name in "
            "a file, so no file says what it is. Pass one that "
            "defines it, --file FILE.py[:STUDY], or go on in Python where it was made: "
            "study.report().verify(), and its best.load() or best.export(DIR) to take a model."
        )
    path = Path(snapshot.source.rpartition(":")[0])
    if path.suffix == ".py" and not path.is_file():
        raise SpecError(
            f"study {snapshot.study} was defined in {path}, and that file is not there any more. "
            "Pass the one that defines it now: --file FILE.py[:STUDY]."
        )


def read_losses(place: Path) -> dict[int, list[float]]:
    """The loss of every step by trial; a step that was done twice counts as done last."""
    found: dict[int, dict[int, float]] = {}
    for event in read_events(place):
        if isinstance(event, StepFinished):
            found.setdefault(event.trial, {})[event.step] = event.loss
    return {trial: [steps[n] for n in sorted(steps)] for trial, steps in found.items()}


@dataclass(slots=True)
class Curve:
    """What is on record of a trial's training, by step: what was done last counts."""

    losses: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, Mapping[str, float]] = field(default_factory=dict)
    epoch_ends: frozenset[int] = frozenset()
    epoch: int | None = None  # of the last step

    @property
    def eval_every(self) -> int | None:
        """The steps from one evaluation to the next; None for one after each epoch.

        Whichever explains more of the evaluations: those that were an end once, of a trial
        that was extended, neither does.
        """
        if not self.evaluations:
            return None
        every = min(self.evaluations)
        explained = {step for step in self.evaluations if step % every == 0}
        explained.add(max(self.evaluations))
        each_epoch = self.epoch_ends <= self.evaluations.keys()
        return None if each_epoch and len(self.epoch_ends) >= len(explained) else every


def read_curve(place: Path, row: TrialRow) -> Curve:
    """A trial's losses and evaluations up to the step it ended at."""
    curve, epochs = Curve(), dict[int, int]()
    for event in read_trial(place, row.number):
        if not isinstance(event, StepFinished | Evaluated) or event.trial != row.number:
            continue
        if event.step > row.step:  # it went back, and ended before it came here again
            continue
        if isinstance(event, StepFinished):
            curve.losses[event.step], epochs[event.step] = event.loss, event.epoch
        else:
            curve.evaluations[event.step] = event.metrics
    curve.epoch = epochs.get(row.step)
    curve.epoch_ends = frozenset({epochs[step]: step for step in sorted(epochs)}.values())
    if row.state is TrialState.FINISHED:
        curve.evaluations[row.step] = row.metrics
    return curve
