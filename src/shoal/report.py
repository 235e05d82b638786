"""What a study came to: its trials, the best of them, and their trained models.

Everything is read from the study's directory, so that a report opened later, or from
another machine's copy, is the one that ``run`` returned.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.aim import Aim, metric_rank
from shoal.core.errors import SpecError, last_words
from shoal.core.spec import HyperParameters, Scalar
from shoal.core.studyfiles import DATABASE
from shoal.core.units import counted, format_bytes, format_seconds, format_value
from shoal.observe import jsonl
from shoal.observe.reader import read_events
from shoal.observe.rows import TrialRow, TrialState
from shoal.observe.snapshot import Snapshot
from shoal.observe.states import STATES, in_order, study_state, trial_state
from shoal.recipes.named import Origin
from shoal.recipes.recipe import Recipe
from shoal.resume.recipe import RecipeRecord, describe_recipe
from shoal.resume.since import changed_since, changed_words
from shoal.source import keeping_arguments

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

    from shoal.verify import Verification


_ORDER = {
    "FINISHED": 0,
    "PRUNED": 1,
    "STOPPED": 2,
    "RUNNING": 3,
    "PENDING": 4,
    "FAILED": 5,
}  # in the leaderboard


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """One trial as it ended.

    ``metrics`` are the values of its last evaluation, which is at its last step unless it was
    stopped, ``history`` is a list of dicts (step,
    epoch, seconds, metrics), ``error`` the traceback of a failure or empty.
    ``checkpoint`` is the directory of the last step's state, None if there is none. ``hp`` are
    the hyperparameters of the last step; of a trial of a population ``inherited`` is a list of
    dicts that say where it went on from another trial: step, source, before, hp. ``recipes`` is
    a list of dicts (step, recipe): which of the study's recipes, numbered from 0, it trained with
    after which step; more than one where another was accepted. ``is_at_best``:
    it is the trial as of its best evaluation (``Report.at_best``).
    """

    number: int
    hp: Mapping[str, Scalar]
    seed: int
    state: TrialState
    metrics: Mapping[str, float]
    history: Sequence[Mapping[str, Any]]
    seconds: float
    error: str
    checkpoint: Path | None
    inherited: Sequence[Mapping[str, Any]] = ()
    recipes: Sequence[Mapping[str, int]] = ()
    is_at_best: bool = False
    _recipe: Recipe | Origin | None = field(default=None, repr=False, compare=False)

    @property
    def hp_schedule(self) -> list[dict[str, Any]]:
        """Its hyperparameters over time: dicts of ``after`` so many steps, ``hp``, ``source``.

        ``source`` is the trial whose state it went on from then; None where it began.
        """
        first = self.inherited[0]["before"] if self.inherited else self.hp
        begun = {"after": 0, "hp": dict(first), "source": None}
        names = {"after": "step", "hp": "hp", "source": "source"}
        return [begun, *({n: one[of] for n, of in names.items()} for one in self.inherited)]

    def load(self) -> Any:
        """The user's own module with the weights of the last step, on CPU in eval mode.

        What it keeps in attributes (a count of steps, a hidden state) is as it was then, but of a
        trial of which only the ``"weights"`` were kept. A dict of modules, where
        ``Recipe(model=...)`` returned a mapping. The process's random streams are left as they
        were. In a study that was opened from its directory this imports the file that defined the
        study.

        Raises:
            SpecError: no checkpoint, no recipe, or a recipe whose model has other weights.
        """
        from shoal.recipes.several import Models  # lazy: see ``_read_weights``

        model = self._load_whole()
        return dict(model.named()) if isinstance(model, Models) else model

    def _load_whole(self) -> nn.Module:
        """As one module, also of a mapping of several."""
        import torch  # lazy: see ``_read_weights``

        from shoal.pystate import Attributes
        from shoal.runtime.saving import checkpoint

        weights = _read_weights(self._checkpoint())
        model = self._build()
        attributes = Attributes(model, None, None)
        try:
            model.load_state_dict(weights, strict=True)
        except RuntimeError as error:
            raise SpecError(
                f"the recipe's model does not fit the weights of trial {self.number} in "
                f"{self.checkpoint}: {error}\nOpen the study with the recipe that trained it: "
                "shoal.open(path, recipe=...)."
            ) from error
        kept = checkpoint.read_attributes(self._checkpoint())
        attributes.give(kept, torch.device("cpu"))
        return model.eval()

    def load_state(self) -> dict[str, Any]:
        """``{"model", "optimizer", "schedule", "rng", "step"}``, by parameter name.

        Raises:
            SpecError: the trial has no checkpoint.
        """
        from shoal.runtime.saving import checkpoint  # lazy: see ``_read_weights``

        return checkpoint.read_state(self._checkpoint())

    def kept_in_python(self) -> list[str]:
        """Which attributes of the model changed as it trained, in words: "'calls' of the model".

        ``load`` gives them back; a file of weights has no place for them.
        """
        from shoal.pystate.attributes import in_words  # lazy: see ``_read_weights``
        from shoal.runtime.saving import checkpoint

        places = checkpoint.read_attributes(self._checkpoint())
        return [in_words(one) for one in places if one.startswith(("the model", "module "))]

    def export(self, directory: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the trained model, and where it comes from, into ``directory``; returns it.

        Raises:
            SpecError: no checkpoint, or the directory is not empty.
        """
        from shoal.export import export_trial  # the one arrow up: it reads reports

        report = read_report(self._checkpoint().parents[2])
        return export_trial(self, report, directory, overwrite=overwrite).directory

    @property
    def recipe_number(self) -> int | None:
        """Which of the study's recipes its weights are of; None where that is not on record."""
        return self.recipes[-1]["recipe"] if self.recipes else None

    def to_dict(self) -> dict[str, Any]:
        """Plain containers of all fields."""
        return {
            "number": self.number,
            "hp": dict(self.hp),
            "seed": self.seed,
            "state": str(self.state),
            "metrics": dict(self.metrics),
            "history": [dict(row) for row in self.history],
            "seconds": self.seconds,
            "error": self.error,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "inherited": [dict(one) for one in self.inherited],
            "recipes": [dict(one) for one in self.recipes],
        }

    def at_best(self, metric: str, mode: str) -> TrialResult:
        """The trial as its best evaluation found it; of equals the first. See ``Report.at_best``.

        Without an evaluation that has a finite value of the metric it is the trial itself.
        """
        aim = Aim(metric, mode)
        best = min(self.history, key=lambda row: aim.rank(row["metrics"]), default=None)
        if best is None or aim.rank(best["metrics"]) == math.inf:
            return self
        before = [one["hp"] for one in self.hp_schedule if one["after"] < best["step"]]
        recipes = [one for one in self.recipes if one["step"] < best["step"]]
        return replace(
            self,
            hp=HyperParameters(before[-1]),
            metrics=dict(best["metrics"]),
            history=[row for row in self.history if row["step"] <= best["step"]],
            recipes=recipes,
            is_at_best=True,
            checkpoint=None if self.checkpoint is None else self._saved_at(best["step"]),
        )

    def _saved_at(self, step: int) -> Path | None:
        """Its own checkpoint of that step, not one that it took over from another trial."""
        from shoal.runtime.saving import checkpoint  # lazy: see ``_read_weights``

        assert self.checkpoint is not None
        found = checkpoint.generations(self.checkpoint.parents[2], self.number).all()
        own = [one for one in found if one.step == step]
        own = [one for one in own if not checkpoint.is_warm(one, self.number)]
        return own[-1].path if own else None

    @property
    def error_line(self) -> str:
        """What went wrong, in a line."""
        return last_words(self.error)

    def _checkpoint(self) -> Path:
        if self.checkpoint is None and self.is_at_best:
            raise SpecError(
                f"of the best evaluation of trial {self.number} there is no checkpoint: "
                "Study(keep_best=True) keeps one from then on. The last one is that of the report "
                "without at_best()."
            )
        if self.checkpoint is None:
            why = f": {self.error_line}" if self.error else ""
            raise SpecError(
                f"trial {self.number} is {self.state}{why}; it has no checkpoint to load. Resume "
                "the study, or choose a FINISHED trial."
            )
        if not self.checkpoint.is_dir():
            if self.state in (TrialState.RUNNING, TrialState.PENDING):
                raise SpecError(
                    f"the checkpoint of trial {self.number} is not at {self.checkpoint} any more. "
                    "The trial has not ended: where it trains, a newer one has taken its place. "
                    "Open the study again: shoal.open(path)."
                )
            raise SpecError(
                f"the checkpoint of trial {self.number} is not at {self.checkpoint} any more. "
                "With keep_finished='best:N' only the best trials keep theirs; or was the study's "
                "directory moved or cleaned up? Open it where it is: shoal.open(path)."
            )
        return self.checkpoint

    def _build(self) -> nn.Module:
        from shoal.runtime.saving.rebuilt import build_model  # lazy: see ``_read_weights``

        if isinstance(self._recipe, Recipe):
            return build_model(self._recipe, self.hp, self.seed)
        with keeping_arguments():
            recipe = self._find_recipe()
            before = _described(recipe)
            model = build_model(recipe, self.hp, self.seed)
        if (after := describe_recipe(recipe).digest) != before.digest:
            _left_by_loading[after] = before
        return model

    def _find_recipe(self) -> Recipe:
        origin = self._recipe if isinstance(self._recipe, Origin) else Origin()
        found = origin.recipe(self._checkpoint().parents[2])
        if found is None:
            raise SpecError(
                f"trial {self.number} needs its recipe to build the model, and the study was made "
                "interactively, or of functions without a name in a file, so that none is on "
                "record. Pass it: "
                "shoal.open(path, recipe=recipe)."
            )
        place = self._checkpoint().parents[2]
        if changed := changed_since(place, _described(found), self.recipe_number):
            warnings.warn(
                f"trial {self.number}: {changed_words(changed)}: shoal.open(path, recipe=...).",
                stacklevel=4,
            )
        return found


_left_by_loading: dict[str, RecipeRecord] = {}
"""What a recipe was, by the digest of what it is once a model of it was made: making one may set
globals, which the model then reads, and this process has one of each."""


def _described(recipe: Recipe) -> RecipeRecord:
    """What a recipe is, but for what loading trials has left in globals."""
    now = describe_recipe(recipe)
    return _left_by_loading.get(now.digest, now)


def _read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint; its reader is imported only when there is one to read."""
    from shoal.runtime.saving import checkpoint

    return checkpoint.read_weights(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most bytes a device held, its budget, and what the plan predicted."""

    peak_bytes: int
    budget_bytes: int
    predicted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A study's results; ``print(report)`` is its leaderboard.

    ``trials`` are in order of their numbers, those that were never planned left out.
    ``wall_seconds`` leaves out the time between a kill and its resume. ``peaks`` has an
    entry per device on which memory was measured.
    """

    study: str
    directory: Path
    metric: str
    mode: str
    trials: list[TrialResult]
    wall_seconds: float
    peaks: Mapping[str, Peak]
    stopped: str = ""
    _states: Mapping[int, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def best(self) -> TrialResult:
        """The FINISHED trial with the best metric; of equals the first. Of ``at_best`` any trial.

        Raises:
            SpecError: no trial finished with a finite value of the metric.
        """
        ranked = [trial for trial in self.ranking() if self._rank(trial) < math.inf]
        if not ranked:
            raise SpecError(self._no_best())
        return ranked[0]

    def ranking(self) -> list[TrialResult]:
        """The trials, best first; then those without a finite metric, then the unfinished.

        Those too by the metric as it was measured last.
        """

        def rank(trial: TrialResult) -> tuple[float, int, float, int]:
            last = metric_rank(trial.metrics.get(self.metric), self.mode)
            return self._rank(trial), _ORDER[trial.state], last, trial.number

        return sorted(self.trials, key=rank)

    def at_best(self) -> Report:
        """The same trials, each as its best evaluation by the metric found it.

        Metrics, history and hyperparameters are those of then; so are the weights of ``load``,
        ``load_state`` and ``export``, where ``Study(keep_best=True)`` kept them. ``best`` is the
        trial with the best of them, whether it finished or was pruned, stopped early or failed
        since.
        """
        return replace(self, trials=[one.at_best(self.metric, self.mode) for one in self.trials])

    def verify(self, trials: int | Sequence[int] | None = None) -> Verification:
        """Train finished trials again in this process, each alone, and compare every bit.

        What ``shoal verify`` does, and all there is for a study of a notebook. ``print`` what it
        returns; ``bool`` says whether all is equal. Globals, random streams and threads of this
        process are as before then.

        Args:
            trials: How many (the best one, one that was interrupted, others at random; default 2),
                or the numbers of those.

        Raises:
            SpecError: there is no such trial, none could be compared, or no file says what the
                study's recipe is: ``shoal.open(path, recipe=...)``.
        """
        from shoal.verify import verify_report  # an arrow up: it reads reports

        recipe = next((one._recipe for one in self.trials), None)
        return verify_report(self.directory, trials, recipe)

    def count(self, state: TrialState | str) -> int:
        """How many trials are in ``state``."""
        return sum(trial.state == state for trial in self.trials)

    def _state_of(self, trial: TrialResult) -> str:
        """A trial's state in the word that every table has for it.

        A trial that is PENDING is ``waiting`` while its study runs, and ``paused`` or ``not
        begun`` where it stands.
        """
        if trial.state in (TrialState.PENDING, TrialState.RUNNING):
            return self._states.get(trial.number, STATES[trial.state])
        return STATES[trial.state]

    def to_dict(self) -> dict[str, Any]:
        """Plain containers of everything."""
        return {
            "study": self.study,
            "directory": str(self.directory),
            "metric": self.metric,
            "mode": self.mode,
            "wall_seconds": self.wall_seconds,
            "stopped": self.stopped,
            "peaks": {
                name: {
                    "peak_bytes": peak.peak_bytes,
                    "budget_bytes": peak.budget_bytes,
                    "predicted_bytes": peak.predicted_bytes,
                }
                for name, peak in self.peaks.items()
            },
            "trials": [trial.to_dict() for trial in self.trials],
        }

    def to_json(self) -> str:
        """Valid JSON; floats that are not finite are "NaN", "Infinity", "-Infinity"."""
        return jsonl.dumps(self.to_dict(), indent=2)

    def to_frame(self) -> pd.DataFrame:
        """One row per trial: number, hyperparameters, seed, state, metrics, seconds, error.

        Raises:
            SpecError: pandas is not installed.
        """
        try:
            import pandas as pd  # lazy: an extra
        except ImportError:
            raise SpecError(
                "to_frame() needs pandas, which is not installed. Install it: pip install "
                "'pandas>=2'."
            ) from None
        return pd.DataFrame([_frame_row(trial) for trial in self.trials])

    def __str__(self) -> str:
        return leaderboard(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook shows where this is a cell's last expression."""
        printer.text(str(self))

    def _rank(self, trial: TrialResult) -> float:
        if trial.state is not TrialState.FINISHED and not trial.is_at_best:
            return math.inf
        return metric_rank(trial.metrics.get(self.metric), self.mode)

    def _no_best(self) -> str:
        finished, pruned = map(self.count, (TrialState.FINISHED, TrialState.PRUNED))
        known = sorted({name for trial in self.trials for name in trial.metrics})
        failed = next((t for t in self.trials if t.state is TrialState.FAILED), None)
        reason = others = ""
        count = counted(len(self.trials), "trial")
        words = f"{finished} of {count} finished, and none with a finite {self.metric!r}"
        if not finished:
            words = f"none of its {count} finished" if self.trials else "it has no trials yet"
        if failed:
            reason = f" Trial {failed.number} failed: {failed.error_line.rstrip('.')}."
        if pruned:
            others = (
                f" {counted(pruned, 'trial')} did not finish since the pruner ended them; their "
                "metrics and checkpoints are in report.trials, and `shoal export STUDY NUMBER "
                "DIR` takes one."
            )
        return (
            f"study {self.study!r} has no best trial: {words}. Metrics there are: "
            f"{', '.join(known) or 'none'}.{others}{reason}"
        )


def read_report(study_dir: str | os.PathLike[str], recipe: Recipe | None = None) -> Report:
    """The report of a study's directory; nothing is run or changed.

    Without ``recipe`` the file that defined the study is imported when a model is loaded.

    Raises:
        SpecError: there is no study in that directory.
    """
    directory = Path(study_dir)
    snapshot = Snapshot.of(read_events(directory))
    if not snapshot.runs:
        raise SpecError(f"there is no study in {directory}: {_what_is_there(directory)}")
    state = study_state(snapshot, directory)
    recorded = Origin(snapshot.study, snapshot.source, snapshot.recipe, snapshot.arguments)
    origin = recorded if recipe is None else recipe
    return Report(
        study=snapshot.study,
        directory=directory,
        metric=snapshot.metric,
        mode=snapshot.mode,
        trials=[_result(row, directory, origin) for row in snapshot.trials],
        wall_seconds=snapshot.seconds,
        peaks={
            device.name: Peak(
                peak_bytes=device.peak_bytes,
                budget_bytes=device.budget_bytes,
                predicted_bytes=device.predicted_bytes,
            )
            for device in snapshot.devices
            if device.peak_bytes
        },
        stopped=snapshot.stopped,
        _states={row.number: trial_state(row, state) for row in snapshot.trials},
    )


def _what_is_there(directory: Path) -> str:
    """What stands where a study was looked for, and what to give instead."""
    names = sorted(found.parent.name for found in directory.glob(f"*/{DATABASE}"))
    if names:
        some = ", ".join(names[:8]) + ", ..." * (len(names) > 8)
        return f"it holds studies: {some}. Give the directory of one: {directory / names[0]}."
    if (Path("runs") / directory / DATABASE).is_file():
        return f"the one of that name is in {Path('runs') / directory}."
    what = f"it has no {DATABASE}, or an empty one"
    if not directory.is_dir():
        what = (
            "it is a file" if directory.exists() else f"it is not there (seen from {Path.cwd()})"
        )
    return f"{what}. Give the directory of a study, runs/NAME."


def _result(row: TrialRow, directory: Path, recipe: Recipe | Origin) -> TrialResult:
    return TrialResult(
        number=row.number,
        hp=HyperParameters(row.hp),
        seed=row.seed,
        state=row.state,
        metrics=dict(row.metrics),
        history=[line.to_dict() for line in row.history],
        seconds=row.seconds,
        error=row.error,
        checkpoint=directory / row.checkpoint if row.checkpoint else None,
        inherited=[one.to_dict() for one in row.inherited],
        recipes=[one._asdict() for one in row.recipes],
        _recipe=recipe,
    )


def _frame_row(trial: TrialResult) -> dict[str, Any]:
    return {
        "number": trial.number,
        **trial.hp,
        "seed": trial.seed,
        "state": str(trial.state),
        **trial.metrics,
        "seconds": trial.seconds,
        "error": trial.error_line,
    }


def leaderboard(report: Report) -> str:
    """The report as text: totals, peaks, and a line per trial, best first."""
    words = [report._state_of(trial) for trial in report.trials]
    counts = in_order({word: words.count(word) for word in words})
    lines = [
        f"study {report.study}: {counted(len(report.trials), 'trial')} ({counts}) in "
        f"{format_seconds(report.wall_seconds)}; {report.mode} {report.metric}"
    ]
    if report.stopped:
        lines.append(f"stopped early: {report.stopped}")
    lines += [
        f"{name}: peak {format_bytes(peak.peak_bytes)} of {format_bytes(peak.budget_bytes)}, "
        f"predicted {format_bytes(peak.predicted_bytes)}"
        for name, peak in report.peaks.items()
    ]
    failed = [trial.number for trial in report.trials if trial.state is TrialState.FAILED][:1]
    more = [f"the error in full: shoal show {report.directory} --trial {one}" for one in failed]
    return "\n".join([*lines, *_table(report), *more])


def _table(report: Report) -> list[str]:
    trials = report.ranking()
    settings = list(dict.fromkeys(name for trial in trials for name in trial.hp))
    metrics = sorted({n for t in trials for n in t.metrics}, key=lambda n: (n != report.metric, n))
    rows = [["trial", *metrics, *settings, "state", "seconds"]]
    for trial in trials:
        values: list[Scalar] = [trial.metrics.get(name, "-") for name in metrics]
        values += [trial.hp.get(name, "-") for name in settings]
        rows.append([format_value(v) for v in (trial.number, *values, report._state_of(trial))])
        rows[-1].append(f"{trial.seconds:.1f}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    notes = [f"  {trial.error_line or _heritage(trial)}".rstrip() for trial in trials]
    return [lines[0], *(line + note for line, note in zip(lines[1:], notes, strict=True))]


def _heritage(trial: TrialResult) -> str:
    """From whom it went on, the last one first."""
    sources = (f"{one['source']} at {one['step']}" for one in reversed(trial.inherited))
    return f"from {', '.join(sources)}" if trial.inherited else ""
