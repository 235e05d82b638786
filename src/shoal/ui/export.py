"""``shoal export``: a trained model as files for others."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from shoal.core.errors import SpecError
from shoal.core.units import format_bytes
from shoal.export import Exported, export_trial
from shoal.observe import jsonl, read_outline
from shoal.observe.snapshot import Snapshot
from shoal.report import Report, TrialResult, read_report
from shoal.resume.recipe import describe_recipe
from shoal.resume.since import changed_since, changed_words
from shoal.source import keeping_arguments
from shoal.ui.failures import ExitCode
from shoal.ui.studies import find_recorded
from shoal.verify import recorded_recipe


def check_target(
    which: str | None, target: str | None = None, *, with_optuna: bool = False
) -> tuple[str, str]:
    """What is to be written where.

    Raises:
        SpecError: a trial together with --optuna, or half of the two without it.
    """
    if with_optuna and which is not None:
        raise SpecError(
            f"--optuna FILE.db hands over all trials, and trial {which!r} is asked for too. Leave "
            "one of the two out."
        )
    if not with_optuna and (which is None or target is None):
        raise SpecError(
            "which trial is to be exported, and where to? Write: shoal export STUDY best DIR. All "
            "of them go to Optuna's dashboard with: shoal export STUDY --optuna FILE.db."
        )
    return which or "", target or ""


def export_model(
    name: str,
    which: str,
    target: str,
    directory: Path,
    *,
    overwrite: bool = False,
    file: str | None = None,
    at_best: bool = False,
    as_json: bool = False,
) -> int:
    """Write the best trial's model, or that of a number, and say what is where.

    ``at_best``: as its best evaluation found it, and the best trial by that.
    """
    place = find_recorded(name, directory)
    # What a model prints is no answer.
    with contextlib.redirect_stdout(sys.stderr), keeping_arguments():
        recipe, _ = recorded_recipe(place, Snapshot.of(read_outline(place)), file)
        report = read_report(place, recipe=recipe)
        report = report.at_best() if at_best else report
        trial = choose_trial(report, which)
        changed = changed_since(place, describe_recipe(recipe), trial.recipe_number)
        done = export_trial(trial, report, target, overwrite=overwrite, changed=changed)
    if changed:
        print(f"WARNING: {changed_words(changed)}: --file FILE.py[:STUDY].", file=sys.stderr)
    print(jsonl.dumps(_record(report, done), indent=2) if as_json else describe(report, done))
    return ExitCode.DONE


def choose_trial(report: Report, which: str) -> TrialResult:
    """``best``, or the trial of a number.

    Raises:
        SpecError: neither, or there is no such trial.
    """
    if which == "best":
        return report.best
    for trial in report.trials:
        if which == str(trial.number):
            return trial
    raise SpecError(
        f"study {report.study} has no trial {which!r}; give 'best' or a number below "
        f"{len(report.trials)}."
    )


def describe(report: Report, done: Exported) -> str:
    """What was written, and how to go on, as text."""
    width = max(map(len, done.files))
    lines = [f"  {name:{width}}  {format_bytes(size)}" for name, size in done.files.items()]
    head = f"trial {done.trial} of {report.study}, step {done.step}, is in {done.directory}"
    return "\n".join(
        [head, *lines, f"next      {done.directory / 'README.md'} says how to load it"]
    )


def _record(report: Report, done: Exported) -> dict[str, object]:
    return {
        "study": report.study,
        "trial": done.trial,
        "step": done.step,
        "directory": str(done.directory),
        "kind": done.kind,
        "files": dict(done.files),
    }
