"""Train trials again, alone, with plain PyTorch, and compare every bit.

Hyperparameters, seed, length and thread count are the trial's own, as recorded. How often
it was evaluated is read off its record, too: a validation source may keep a state of its
own from pass to pass.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shoal.core.arraykeys import has_one_base, looped_in, stacks_all
from shoal.core.errors import ShoalError, SpecError, StorageError
from shoal.core.seats import epochs_of
from shoal.frames import user_line
from shoal.kernels.kernelchoice import EXACT, STRICT, TOLD, KernelChoice, only_deterministic
from shoal.observe.reader import read_outline
from shoal.observe.rows import TrialRow, TrialState
from shoal.observe.snapshot import Snapshot
from shoal.planning import BY_SHARDS, array_kind, array_place
from shoal.pystate import ambient
from shoal.recipes.recipe import Recipe
from shoal.recipes.schedules import schedule_numerics
from shoal.report import TrialResult, read_report
from shoal.resume.recipe import describe_recipe
from shoal.resume.since import changed_since, changed_words
from shoal.runtime.gangs.pipelined import without_versions
from shoal.testing import PlainResult, PlainTrial, compare, plain_population
from shoal.verify.best import as_of, best_of, keeps_best, step_of
from shoal.verify.choose import skip_reason, warm_clones, with_two_recipes, without_state
from shoal.verify.mainblock import main_note
from shoal.verify.record import Curve, read_curve, recorded_recipe

UNSTEADY = (
    "trained alone once more it ended on other bits again, so something in it gives another "
    "result each time (a kernel, a clock, a random generator without a seed), in any loop"
)
STATE: tuple[str, ...] = ("weights", "optimizer state", "schedule", "random numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialVerdict:
    """Whether one trial ended on the bits of the plain loop.

    ``tensors``, ``losses`` and ``metrics`` are how many were compared, ``compared`` names
    what of the trial was; ``best_tensors`` how many of the state of its best evaluation, after
    ``best_step``, where that was kept beside its last one (None: it was not).
    ``first_difference`` is in words, empty when there is none. ``failure`` says why it could not
    be trained alone, ``skipped`` why nobody tried to, and ``notes`` what a reader should know.
    """

    number: int
    steps: int
    tensors: int = 0
    losses: int = 0
    metrics: int = 0
    best_step: int | None = None
    best_tensors: int = 0
    first_difference: str = ""
    plain_s: float = 0.0
    compared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    skipped: str = ""
    failure: str = ""

    @property
    def equal(self) -> bool:
        """Whether it was compared, and nothing differed."""
        return not (self.first_difference or self.skipped or self.failure)


def verify_trials(
    place: Path,
    rows: Sequence[TrialRow],
    *,
    recipe: Recipe | None = None,
    file: str | None = None,
) -> Iterator[TrialVerdict]:
    """Retrain each of ``rows`` in this process and compare; one verdict at a time.

    ``recipe`` is the one that trained the study; None imports it from ``file``, or from
    the file on record.

    Raises:
        SpecError: there is no such file, or what it defines is of another study.
    """
    snapshot, is_given = Snapshot.of(read_outline(place)), recipe is not None
    by_epochs = snapshot.by_epochs
    if recipe is None:
        recipe, by_epochs = recorded_recipe(place, snapshot, file)
    results = {trial.number: trial for trial in read_report(place, recipe).trials}
    population = {r.number: _as_plain(r) for r in snapshot.trials}
    warm, gone = warm_clones(place), without_state(place, snapshot)
    mixed, has_best = with_two_recipes(place, snapshot), keeps_best(place)
    described = describe_recipe(recipe)
    for row in rows:
        reason = skip_reason(row, warm, gone, mixed)
        if reason:
            yield TrialVerdict(number=row.number, steps=row.step, skipped=reason)
            continue
        trial, curve = results[row.number], read_curve(place, row)
        best = best_of(trial, snapshot, row.step) if has_best else None
        case = _Case(row, trial, recipe, curve, by_epochs, population, best)
        verdict = case.verdict()
        number = row.recipes[-1].recipe if row.recipes else None
        differs = verdict.first_difference or verdict.failure
        if (differs or not is_given) and (changed := changed_since(place, described, number)):
            there = "shoal.open(path, recipe=...)" if is_given else "--file FILE.py[:STUDY]"
            words = f"{changed_words(changed)}: {there}"
            verdict = replace(verdict, notes=(words, *verdict.notes))
        if differs and not is_given and (words := main_note(file or snapshot.source)):
            verdict = replace(verdict, notes=(*verdict.notes, words))
        yield verdict


@dataclass(frozen=True, slots=True)
class _Case:
    """One trial as it is on record, to be held against training alone."""

    row: TrialRow
    trial: TrialResult
    recipe: Recipe
    curve: Curve
    by_epochs: bool
    population: Mapping[int, PlainTrial]  # of which it is one, all trials as they began
    best: TrialResult | None  # as of its best evaluation, where that is another state to compare

    def verdict(self) -> TrialVerdict:
        """What came of it; an error of the trial's own is a failure, and no difference."""
        with only_deterministic(self.row.numerics.get(EXACT) == STRICT):
            return self._verdict()

    def _verdict(self) -> TrialVerdict:
        number, steps = self.row.number, self.row.step
        notes = environment_notes(self.row.numerics, self.recipe) + _heritage(self.row)
        if array_place(self.row.numerics):
            way = self.row.numerics.get("array_pass")
            where = f"{self.row.numerics['array']}{f', {way}' if way else ''}"
            notes += (f"in its array, {where}, with nobody beside it",)
        if width := self.row.numerics.get("replicas"):
            notes += (f"by the rule of {width} replicas, one after the other in one process",)
        if width := self.row.numerics.get("copies"):
            notes += (f"by the rule of {width} copies, whose gradients are added in their order",)
        if weights := self.row.numerics.get("weights"):
            notes += (f"by the rule of 2bw in one process: weights {weights}",)
        try:
            state = _load(self.trial)
        except SpecError as error:  # nothing is there to compare
            return TrialVerdict(number=number, steps=steps, skipped=str(error))
        except ShoalError as error:
            return TrialVerdict(number=number, steps=steps, first_difference=str(error))
        started = time.monotonic()
        try:
            plain = self._train()
            verdict = self._judge(plain, state, time.monotonic() - started, notes)
            return self._explained(self._with_best(verdict), plain)
        except SpecError:  # of another study's recipe
            raise
        except Exception as error:
            failure, notes = _failure(error), notes + _wrong_place(error)
            return TrialVerdict(number=number, steps=steps, failure=failure, notes=notes)

    def _with_best(self, verdict: TrialVerdict) -> TrialVerdict:
        """With the state of its best evaluation held against training alone up to there."""
        if (best := self.best) is None:
            return verdict
        step = step_of(best)
        if best.checkpoint is None:
            note = f"of its best evaluation, after step {step}, there is no checkpoint to compare"
            return replace(verdict, notes=(*verdict.notes, note))
        try:
            state = _load(best)
        except ShoalError as error:
            return _with_difference(verdict, step, str(error))
        started = time.monotonic()
        plain = self._train(until=step)
        found = compare(plain, _filled(plain, state))
        took = verdict.plain_s + time.monotonic() - started
        tensors = len(state["model"]) if _has_weights_only(state) else found.tensors
        verdict = replace(verdict, best_step=step, best_tensors=tensors, plain_s=took)
        return _with_difference(verdict, step, found.first_difference)

    def _explained(self, verdict: TrialVerdict, plain: PlainResult) -> TrialVerdict:
        """With a note where training alone differs from training alone: then all of it may."""
        if not verdict.first_difference:
            return verdict
        again = self._train()
        found = compare(plain, again.state(), losses=again.losses)
        if found.equal:
            return verdict
        return replace(verdict, notes=(*verdict.notes, f"{UNSTEADY}: {found.first_difference}"))

    def _train(self, until: int | None = None) -> PlainResult:
        """All of it again; or no more than ``until`` a step, after which it was evaluated."""
        row, ended = self.row, self.row.state is TrialState.FINISHED
        epochs = self.curve.epoch if self.by_epochs and ended and not until else None
        told: dict[str, Any] = {"epochs": epochs, "steps": None if epochs else until or row.step}
        trials = as_of(self.population, row.number, until) if until else self.population
        told |= {"eval_every": self.curve.eval_every, **_numerics(row, self.recipe)}
        with ambient.watching(self.recipe) as here:
            try:
                return plain_population(self.recipe, trials, row.number, **told)
            finally:
                here.begin()  # for the trial after it

    def _judge(
        self, plain: PlainResult, state: Mapping[str, Any], plain_s: float, notes: tuple[str, ...]
    ) -> TrialVerdict:
        losses = [self.curve.losses[step] for step in sorted(self.curve.losses)]
        found = compare(plain, _filled(plain, state), losses=losses)
        tensors, compared = found.tensors, STATE
        if _has_weights_only(state):
            tensors, compared = len(state["model"]), STATE[:1]
            notes += ("only its weights were kept: no optimizer state or random numbers",)
        metrics, first = self._compare_metrics(plain)
        return TrialVerdict(
            number=self.row.number,
            steps=self.row.step,
            tensors=tensors,
            losses=len(losses),
            metrics=metrics,
            first_difference=found.first_difference or first,
            plain_s=plain_s,
            compared=(*compared, "losses", *(["metrics"] if metrics else [])),
            notes=notes,
        )

    def _compare_metrics(self, plain: PlainResult) -> tuple[int, str]:
        """How many validation metrics were compared, and the first that differs."""
        count, first = 0, ""
        # Where a seat was asked for it may have been evaluated in either one.
        either = {epoch.step for epoch in epochs_of(self.row.numerics) if epoch.asked}
        recorded = {s: v for s, v in self.curve.evaluations.items() if s not in either}
        for row in plain.history:
            expected = {n: v for n, v in row["metrics"].items() if n.startswith("valid_")}
            for name, value in expected.items() if row["step"] in recorded else ():
                count += 1
                found = recorded[row["step"]].get(name)
                if repr(found) != repr(value) and not first:
                    first = (
                        f"metric {name!r} of step {row['step']}: {value!r} expected, {found!r} "
                        "found"
                    )
        return count, first


def _load(trial: TrialResult) -> dict[str, Any]:
    try:
        return trial.load_state()
    except StorageError:  # one that was let go while it was read says so the second time
        return trial.load_state()


def _with_difference(verdict: TrialVerdict, step: int, difference: str) -> TrialVerdict:
    """With a difference of the state of its best evaluation, if nothing else differed."""
    if not difference or verdict.first_difference:
        return verdict
    words = f"its best evaluation, after step {step}: {difference}"
    return replace(verdict, first_difference=words)


def _failure(error: Exception) -> str:
    line = user_line(error)
    return f"{type(error).__name__}: {error}" + f" (at {line})" * bool(line)


def _wrong_place(error: Exception) -> tuple[str, ...]:
    """Why a file may not be found that was there when the study trained."""
    if not isinstance(error, FileNotFoundError) or os.path.isabs(str(error.filename or "")):
        return ()
    return (
        f"a relative path holds in the directory where the study ran, and this is {Path.cwd()}: "
        "verify from there, or make the path an absolute one",
    )


def _as_plain(row: TrialRow) -> PlainTrial:
    first = row.inherited[0].before if row.inherited else row.hp
    inherits = {taken.step: (taken.source, taken.hp) for taken in row.inherited}
    place, later = array_place(row.numerics), epochs_of(row.numerics)[1:]
    kind = array_kind(row.numerics)
    if kind == "traced":
        kind = "eager"  # whose bits it has: the operations themselves, and no graph of them
    places: dict[str, Any] = {"place": place, "kind": kind, "later": later}
    places["any_layout"] = stacks_all(row.numerics)
    places["one_base"] = has_one_base(row.numerics)
    places["looped"] = looped_in(row.numerics)
    return PlainTrial(hp=first, seed=row.seed, inherits=inherits, **places)


def _heritage(row: TrialRow) -> tuple[str, ...]:
    """From whom it went on: those were trained again too."""
    sources = ", ".join(f"{taken.source} after step {taken.step}" for taken in row.inherited)
    return (f"with the trials that it went on from trained again too: {sources}",) * bool(sources)


def _has_weights_only(state: Mapping[str, Any]) -> bool:
    return state.get("optimizer") is None


def _filled(plain: PlainResult, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state, with the plain loop's own in the place of what was not kept.

    Without the older weights of a pipeline, from which it would go on.
    """
    if not _has_weights_only(state):
        return without_versions(state)
    return plain.state() | {"model": state["model"], "step": state["step"]}


def environment_notes(numerics: Mapping[str, Any], recipe: Recipe) -> tuple[str, ...]:
    """What of the numerics key is not as it was: then bits may differ for that reason."""
    on_gpu = _is_gpu(numerics) and torch.cuda.is_available()
    kernels = KernelChoice.here()
    now = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0) if on_gpu else "cpu",
        "matmul": kernels.matmul,
        "precision": recipe.precision,
        "accumulate": recipe.accumulate,
        "loss_rows": recipe.loss_rows,
        **schedule_numerics(recipe),
    }
    changed = [
        f"{name} {numerics[name]} then, {value} now"
        for name, value in now.items()
        if name in numerics and numerics[name] != value
    ]
    told = kernels.told(on_gpu=on_gpu)
    changed += [
        f"{name} {numerics.get(name, 'no')} then, {told.get(name, 'no')} now"
        for name in TOLD
        if numerics.get(name) != told.get(name)
    ]
    return (f"bits may differ, since the numerics key does: {'; '.join(changed)}",) * bool(changed)


def _is_gpu(numerics: Mapping[str, Any]) -> bool:
    return bool(numerics.get("device", "cpu") != "cpu")


def _numerics(row: TrialRow, recipe: Recipe) -> dict[str, Any]:
    """What of the trial's numerics key the plain loop is told."""
    on_gpu = _is_gpu(row.numerics) and torch.cuda.is_available()
    count = row.numerics.get("micro_batches")
    return {
        "threads": int(row.numerics.get("threads") or 1),
        "device": "cuda" if on_gpu else "cpu",
        "optimizer": "host" if row.numerics.get("optimizer_place") == "host" else "device",
        "weights": row.numerics.get("weights", "newest"),
        "replicas": int(row.numerics.get("replicas") or 1),
        "sharded": row.numerics.get("sums") == BY_SHARDS,
        "copies": int(row.numerics.get("copies") or 1),
        "pieces": int(count) // recipe.accumulate if count else 1,
    }
