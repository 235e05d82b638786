"""``shoal ls``, ``show`` and ``trace``: reading what studies wrote; needs no torch."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.aim import Aim, metric_rank
from shoal.core.errors import SpecError, StorageError
from shoal.core.seats import ALONE, epochs_of
from shoal.core.spec import varying_names
from shoal.core.studyfiles import DATABASE, PLAN, trial_directory
from shoal.core.units import counted, format_bytes, format_seconds, format_value
from shoal.core.whys import unfused_counts
from shoal.observe import (
    jsonl,
    read_events,
    read_outline,
    read_timeline,
    read_trial,
    write_gantt,
    write_trace,
)
from shoal.observe.rows import DeviceRow, Inherited, TrialRow, TrialState
from shoal.observe.snapshot import Folder, Snapshot
from shoal.observe.states import study_state, trial_state
from shoal.resume.since import two_recipes
from shoal.ui.failures import ExitCode
from shoal.ui.studies import find_recorded, last_written, study_directories
from shoal.ui.text import (
    DASH,
    align,
    align_within,
    fits,
    format_changes,
    format_metric,
    format_steps,
    how,
    plain_reason,
    shorten,
    terminal_width,
    without_columns,
    wrap,
)


def read_snapshot(place: Path, *, with_actions: bool = False) -> Snapshot:
    """The state of the study in ``place``; ``with_actions`` also tells how busy devices were."""
    folder = Folder().add_all(read_events(place))
    if with_actions:
        folder.add_all(read_timeline(place))
    return folder.snapshot()


def read_summary(place: Path) -> Snapshot:
    """What ``ls`` tells of a study; its steps are read only where a result is in them."""
    snapshot = Snapshot.of(read_outline(place))
    return read_snapshot(place) if snapshot.metric == "train_loss" else snapshot


# ---------------------------------------------------------------- ls


def list_studies(directory: Path, *, as_json: bool) -> int:
    """Print one line per study; what is wrong with one that cannot be read goes beside it."""
    places = study_directories(directory)
    found = {place: _summary_or_error(place) for place in places}
    if as_json:
        print(jsonl.dumps([_ls_record(place, s) for place, s in found.items()], indent=2))
    elif not places:
        print(f"no studies in {directory.resolve()}")
    else:
        print(ls_table(found, width=terminal_width()))
    errors = [error for error in found.values() if isinstance(error, StorageError)]
    for error in errors:
        print(f"shoal: {error}", file=sys.stderr)
    return ExitCode.STORAGE if errors else ExitCode.DONE


def _summary_or_error(place: Path) -> Snapshot | StorageError:
    try:
        return read_summary(place)
    except StorageError as error:
        return error


def _ls_record(place: Path, snapshot: Snapshot | StorageError) -> dict[str, Any]:
    if isinstance(snapshot, StorageError):
        known = {"study": place.name, "directory": str(place)}
        return known | {"state": "unreadable", "error": str(snapshot)}
    return study_record(place, snapshot)


_SAVED = re.compile(r"step-([0-9]+)")
DEVICE_HEADER = ("device", "peak", "budget", "peak/budget", "predicted", "busy", "restarts")
_REASONS, _FAILED = 3, 5  # lines at most
_LS_HEADER = (
    *("study", "state", "trials", "pruned", "failed"),
    *("best", "metric", "took", "last written"),
)


def ls_table(found: Mapping[Path, Snapshot | StorageError], *, width: int | None = None) -> str:
    """A line per study; how many trials were pruned is left out where none was.

    ``width``: of a line; where that is too little the columns that say least are left out.
    """
    table = [_ls_row(place, s) for place, s in found.items()]
    pruned = _LS_HEADER.index("pruned")
    left = [pruned] * all(row[pruned] in ("0", DASH) for row in table)
    names = "took", "last written", "metric", "pruned", "failed"
    return _within(width, _LS_HEADER, table, names, left)


def _ls_row(place: Path, snapshot: Snapshot | StorageError) -> list[str]:
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(last_written(place)))
    if isinstance(snapshot, StorageError):
        return [place.name, "unreadable", *[DASH] * (len(_LS_HEADER) - 3), written]
    best = best_trial(snapshot)
    return [
        place.name,
        study_state(snapshot, place),
        f"{snapshot.count(TrialState.FINISHED)}/{snapshot.total}" if snapshot.runs else DASH,
        str(snapshot.count(TrialState.PRUNED)),
        str(snapshot.count(TrialState.FAILED)),
        format_metric(best.metrics[snapshot.metric]) if best else DASH,
        snapshot.metric or DASH,
        format_seconds(snapshot.seconds) if snapshot.runs else DASH,
        written,
    ]


def ending_code(snapshot: Snapshot) -> ExitCode:
    """What the shell is told of a study that ended."""
    if snapshot.stopped or not snapshot.is_finished:
        return ExitCode.PAUSED
    is_well = not snapshot.count(TrialState.FAILED) and not nan_lines(snapshot)
    return ExitCode.DONE if is_well else ExitCode.TRIALS_FAILED


def describe_ending(snapshot: Snapshot, place: Path) -> str:
    """What a finished run prints: leaderboard, devices, failures, where the weights are."""
    board = leaderboard(snapshot, study_state(snapshot, place), width=terminal_width())
    parts = ["", board, "", device_table(snapshot, width=terminal_width()), ""]
    if failures := failure_lines(snapshot, place):
        parts += [*failures, ""]
    parts += remarks(snapshot, place)
    best = best_trial(snapshot)
    if best is not None and best.checkpoint:
        which = f"{'least' if snapshot.mode == 'min' else 'greatest'} {snapshot.metric}"
        where = place / best.checkpoint
        parts.append(f"best      trial {best.number}, the {which}; weights in {where}")
    return "\n".join([*parts, f"events    {place / DATABASE}"])


def _origin(snapshot: Snapshot) -> str:
    script = snapshot.recipe.get("script")
    return snapshot.source or (f"functions of {script}" if script else "an interactive session")


# ---------------------------------------------------------------- show


def show_study(name: str | None, trial: int | None, directory: Path, *, as_json: bool) -> int:
    """Print a study, or one of its trials."""
    place = find_recorded(name, directory)
    if trial is not None:
        snapshot = Snapshot.of(read_trial(place, trial))
        row = _find_trial(snapshot, trial, place)
        record = trial_record(row) | {"history": [entry.to_dict() for entry in row.history]}
        width = terminal_width()
        text = wrap(describe_trial(snapshot, row, place, width=width), width)
        print(jsonl.dumps(record, indent=2) if as_json else text)
        return ExitCode.DONE
    snapshot = read_snapshot(place, with_actions=True)
    if as_json:
        print(jsonl.dumps(full_record(place, snapshot), indent=2))
    else:
        print(wrap(describe_study(snapshot, place), terminal_width()))
    return ExitCode.DONE


def describe_study(snapshot: Snapshot, place: Path) -> str:
    """A study as text: leaderboard, devices, failures."""
    if not snapshot.runs:  # study.json is there
        return (
            f"study {place.name}: {study_state(snapshot, place)}, nothing that happened is on "
            f"record in {place}. Where it does not run, its file begins it: shoal run FILE.py"
        )
    versions = ", ".join(f"{name} {version}" for name, version in snapshot.versions.items())
    count = snapshot.count(TrialState.PRUNED)
    pruned = f"{count} pruned, " if count else ""
    state = study_state(snapshot, place)
    parts = [
        f"study {snapshot.study}: {state}, "
        f"{snapshot.count(TrialState.FINISHED)} of {counted(snapshot.total, 'trial')} finished, "
        f"{pruned}"
        f"{snapshot.count(TrialState.FAILED)} failed, in {format_seconds(snapshot.seconds)}",
        f"in {place}, from {_origin(snapshot)}; {versions}",
        "",
        leaderboard(snapshot, state, width=terminal_width()),
        "",
        device_table(snapshot, width=terminal_width()),
    ]
    failures = failure_lines(snapshot, place)
    more = [
        line for lines in (failures, remarks(snapshot, place)) if lines for line in ("", *lines)
    ]
    return "\n".join([*parts, *more])


def leaderboard(snapshot: Snapshot, study: str = "running", *, width: int | None = None) -> str:
    """The trials, the best first; then those that have no metric.

    Where all of them finished, their states are left out. ``study``: its state, in which what the
    record has as running may not be. ``width``: of a line, where it is limited; columns that have
    no room are named, after long titles were shortened.
    """
    rows = ranking(snapshot)
    names = varying_names(row.hp for row in snapshot.trials)
    table = [_leaderboard_row(row, names, snapshot.metric, study) for row in rows]
    header = ["trial", *names, "from", "how", "state", "step", "loss", snapshot.metric, "took"]
    from_, how_, state, step, loss, _, took = range(1 + len(names), len(header))
    left = [from_] * (not any(row.inherited for row in rows))
    left += [state] * all(row.state is TrialState.FINISHED for row in rows)
    droppable = (took, how_, step, loss, from_, *range(len(names), 0, -1))
    return align_within(header, table, width, droppable, left)


def ranking(snapshot: Snapshot) -> list[TrialRow]:
    """Finished trials first, by the last value of the metric: that of their weights."""

    def rank(row: TrialRow) -> tuple[bool, float, int]:
        value = metric_rank(row.metrics.get(snapshot.metric), snapshot.mode)
        return row.state is not TrialState.FINISHED, value, row.number

    return sorted(snapshot.trials, key=rank)


def best_trial(snapshot: Snapshot) -> TrialRow | None:
    """The first of the ranking, if it finished with a finite metric: ``report.best``."""
    for row in ranking(snapshot)[:1]:
        value = row.metrics.get(snapshot.metric, math.nan)
        if row.state is TrialState.FINISHED and math.isfinite(value):
            return row
    return None


def _leaderboard_row(row: TrialRow, names: list[str], metric: str, study: str) -> list[str]:
    settings = [format_value(row.hp[n]) if n in row.hp else DASH for n in names]
    return [
        str(row.number),
        *(shorten(setting, 24) for setting in settings),
        taken_from(row),
        how(row),
        trial_state(row, study),
        format_steps(row.step, row.steps),
        format_metric(row.smooth_loss),
        format_metric(row.metrics.get(metric)),
        format_seconds(row.seconds) if row.step else DASH,
    ]


def taken_from(row: TrialRow) -> str:
    """The trial, and its step, from which it went on last; a dash where from none."""
    return f"{row.inherited[-1].source} at {row.inherited[-1].step}" if row.inherited else DASH


def device_table(snapshot: Snapshot, *, width: int | None = None) -> str:
    """What each device held at most, beside its budget, and how much of the time it computed.

    ``width``: of a line; where that is too little the columns that say least are left out.
    """
    table = [device_cells(row) for row in snapshot.devices]
    return _within(width, DEVICE_HEADER, table, ("peak/budget", "predicted", "restarts"))


def _within(
    width: int | None,
    header: Sequence[str],
    table: Sequence[Sequence[str]],
    names: Sequence[str],
    left: Sequence[int] = (),
) -> str:
    """A table without the columns ``left``, nor as many of ``names`` as have no room."""
    text = align(*without_columns(header, table, left))
    for name in names:
        if fits(text, width):
            break
        left = [*left, header.index(name)]
        text = align(*without_columns(header, table, left))
    return text


def device_cells(row: DeviceRow) -> list[str]:
    """A device as the table's words."""
    has_both = row.peak_bytes and row.budget_bytes  # no peak is measured of compiled arrays
    share = f"{100 * row.peak_bytes / row.budget_bytes:.0f}%" if has_both else DASH
    return [
        row.name,
        format_bytes(row.peak_bytes) if row.peak_bytes else DASH,
        format_bytes(row.budget_bytes),
        share,
        format_bytes(row.predicted_bytes) if row.predicted_bytes else DASH,
        DASH if row.busy is None else f"{100 * row.busy:.0f}%",
        str(row.restarts),
    ]


def planned_reasons(place: Path) -> dict[int, tuple[str, ...]]:
    """Why the trials of the last plan train as they do; nothing where it cannot be read."""
    try:
        jobs = json.loads((place / PLAN).read_text())["jobs"]
        return {int(job["trial"]): tuple(map(str, job["why"])) for job in jobs}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def unfused_lines(place: Path) -> list[str]:
    """Why trials that were to share arrays do not, a line for each reason."""
    reasons = (why for all_ in planned_reasons(place).values() for why in all_)
    return [f"unfused   {words}" for words in unfused_counts(reasons)]


def replanned_lines(snapshot: Snapshot) -> list[str]:
    """Why trials went on otherwise than they were planned to, a line for each reason."""
    rows = [row for row in snapshot.trials if row.replans]
    found = Counter(plain_reason(why) for row in rows for why in {r.reason for r in row.replans})
    lines = [
        f"replanned {counted(count, 'trial')}: {why}" for why, count in found.most_common(_REASONS)
    ]
    left = len(found) - _REASONS
    return lines + [f"replanned ... and {counted(left, 'more reason')}"] * (left > 0)


def warning_lines(snapshot: Snapshot) -> list[str]:
    """What its user has probably not meant, a line each."""
    return [f"warning   {warning}" for warning in snapshot.warnings]


def nan_lines(snapshot: Snapshot) -> list[str]:
    """That there is no best trial, since no trial's metric ended as a number."""
    values = [
        row.metrics[snapshot.metric] for row in snapshot.trials if snapshot.metric in row.metrics
    ]
    if not values or not snapshot.is_finished or any(map(math.isfinite, values)):
        return []
    return [f"no best   {snapshot.metric} of {counted(len(values), 'trial')} is no finite number"]


def onward_lines(snapshot: Snapshot, place: Path) -> list[str]:
    """How a study that was stopped goes on."""
    left = sum(not row.is_done for row in snapshot.trials)
    if not left or study_state(snapshot, place) != "stopped":
        return []
    return [f"goes on   {counted(left, 'trial')} from where they stand: shoal resume {place}"]


def unsaved_lines(snapshot: Snapshot, place: Path) -> list[str]:
    """Of a study whose process was killed: the steps on record that no checkpoint has."""
    if study_state(snapshot, place) != "interrupted":
        return []
    lost = [row.step - _saved_step(row) for row in snapshot.trials if not row.is_done]
    lost = [steps for steps in lost if steps > 0]
    if not lost:
        return []
    return [
        f"unsaved   {counted(sum(lost), 'step')} of {counted(len(lost), 'trial')} came after the "
        f"last checkpoint and are done again: shoal resume {place}"
    ]


def _saved_step(row: TrialRow) -> int:
    saved = _SAVED.search(row.checkpoint)
    return int(saved[1]) if saved else 0


def remarks(snapshot: Snapshot, place: Path) -> list[str]:
    """What of a study is not as its user may take it to be."""
    return [
        *onward_lines(snapshot, place),
        *unsaved_lines(snapshot, place),
        *unfused_lines(place),
        *replanned_lines(snapshot),
        *warning_lines(snapshot),
        *nan_lines(snapshot),
    ]


def failure_lines(snapshot: Snapshot, place: Path) -> list[str]:
    """A line for each of the first failed trials, and where their tracebacks are."""
    failed = [row for row in snapshot.trials if row.state is TrialState.FAILED]
    lines = [f"trial {r.number} failed at step {r.step}: {r.error_line}" for r in failed[:_FAILED]]
    if len(failed) > _FAILED:
        lines.append(f"... and {len(failed) - _FAILED} more failed")
    if failed:
        lines.append(f"the error in full: shoal show {place} --trial {failed[0].number}")
    return lines


def _trains_as(row: TrialRow) -> str:
    """Its technique and how it is cut, or its seat if it is in an array now."""
    technique = row.technique.lower() or "not planned"
    cut = counted(row.shards, "stage" if row.technique == "Pipelined" else "shard")
    if copies := row.numerics.get("copies"):
        cut = f"{cut} in each of {copies} copies"
    if row.technique == "DataParallel":
        cut = counted(int(row.numerics.get("replicas") or 1), "replica")
    epochs = epochs_of(row.numerics)
    if not epochs or epochs[-1].width == ALONE:
        return f"{technique}, {cut}"
    seat = f"slot {epochs[-1].slot} of an array of {epochs[-1].width}"
    return f"{technique}, {seat}, {cut}" if row.technique == "Spilled" else seat


def describe_trial(
    snapshot: Snapshot, row: TrialRow, place: Path, *, width: int | None = None
) -> str:
    """A trial as text: settings, learning curve, error; ``width``: of a line of the curve."""
    settings = ", ".join(f"{name}={format_value(value)}" for name, value in row.hp.items())
    state = trial_state(row, study_state(snapshot, place))
    none = "" if row.step else "on no device yet; "  # which one was last is not on record
    place_of = f"last on {row.device}; " if row.device else none
    lines = [
        f"trial {row.number} of {snapshot.study} ({settings}; seed {row.seed}): "
        f"{state} at step {format_steps(row.step, row.steps)}",
        f"{_trains_as(row)}, predicted peak "
        f"{format_bytes(row.predicted_bytes)}; {place_of}"
        f"{format_seconds(row.seconds)}, {counted(row.restarts, 'restart')}",
        "numerics: " + ", ".join(f"{name}={value}" for name, value in row.numerics.items()),
    ]
    reasons = row.why or planned_reasons(place).get(row.number, ())  # of a record of old
    lines += [f"- {why}" for why in reasons]
    lines += [
        f"after step {one.step} it was planned again: {plain_reason(one.reason)}"
        for one in row.replans
    ]
    lines += [_inheritance_line(one) for one in row.inherited]
    if words := two_recipes(place, row.recipes):
        lines.append(words)
    if row.ended:
        lines.append(f"{row.state.lower()}: {row.ended}")
    if row.checkpoint:
        lines.append(f"weights: {_inside(place, row.checkpoint)}")
    lines += _best_lines(snapshot, row, place)
    if row.history:
        lines += ["", _history_table(row, snapshot.metric, width)]
    if row.error:
        lines += ["", row.error.rstrip()]
    return "\n".join(lines)


def _best_lines(snapshot: Snapshot, row: TrialRow, place: Path) -> list[str]:
    """Its best evaluation, where that is not the last one; and whether its state was kept."""
    aim = Aim(snapshot.metric, snapshot.mode)
    best = min(row.history, key=lambda entry: aim.rank(entry.metrics), default=None)
    if best is None or best is row.history[-1] or aim.rank(best.metrics) == math.inf:
        return []
    found = trial_directory(place, row.number).glob(f"step-{best.step:08d}*")
    kept = [path for path in found if path.suffix != ".tmp"]
    where = f"; weights: {kept[-1]}" if kept else "; not kept: Study(keep_best=True) would"
    value = format_metric(best.metrics[snapshot.metric])
    return [f"best: {snapshot.metric} {value} at step {best.step}, epoch {best.epoch}{where}"]


def _inheritance_line(taken: Inherited) -> str:
    return (
        f"after step {taken.step} it went on from trial {taken.source}'s state, with "
        f"{format_changes(taken.changes)}"
    )


def _history_table(row: TrialRow, metric: str, width: int | None) -> str:
    names = list(dict.fromkeys(name for entry in row.history for name in entry.metrics))
    cells = [
        [
            str(entry.step),
            str(entry.epoch),
            format_seconds(entry.seconds),
            *(format_metric(entry.metrics.get(name)) for name in names),
        ]
        for entry in row.history
    ]
    header = ["step", "epoch", "after", *names]
    others = [place for place in range(len(header) - 1, 0, -1) if header[place] != metric]
    return align_within(header, cells, width, [2, *others])


def _inside(place: Path, written: str) -> Path:
    path = Path(written)
    return path if path.is_absolute() or path.exists() else place / path


def _find_trial(snapshot: Snapshot, number: int, place: Path) -> TrialRow:
    for row in snapshot.trials:
        if row.number == number:
            return row
    total = Snapshot.of(read_outline(place)).total  # with those that were added, as clones are
    if 0 <= number < total:
        raise SpecError(f"trial {number} of study {snapshot.study} has not been planned yet.")
    raise SpecError(
        f"study {snapshot.study} has no trial {number}; it has {total}, numbered from 0."
    )


# ---------------------------------------------------------------- trace


def trace_study(name: str | None, output: str | None, directory: Path, *, as_json: bool) -> int:
    """Write the timeline and the chart, and say where and how to look at them."""
    place = find_recorded(name, directory)
    trace = Path(output) if output else place
    chart = trace.with_suffix(".svg")
    if trace.suffix == ".svg":
        trace = trace.with_suffix(".json")
    if trace.is_dir() or not trace.suffix:
        trace, chart = trace / "trace.json", trace / "gantt.svg"
    try:
        trace.parent.mkdir(parents=True, exist_ok=True)
        write_trace(place, trace)
        write_gantt(place, chart)
    except OSError as error:
        raise StorageError(
            f"cannot write the timeline to {error.filename or trace}: {error.strerror or error}. "
            f"Say where it may go: shoal trace {place} --output DIR."
        ) from error
    if as_json:
        print(jsonl.dumps({"trace": str(trace), "chart": str(chart)}))
    else:
        print(f"timeline  {trace}  (open it at https://ui.perfetto.dev)")
        print(f"chart     {chart}  (open it in a browser)")
    return ExitCode.DONE


# ---------------------------------------------------------------- records for --json


def study_record(place: Path, snapshot: Snapshot) -> dict[str, Any]:
    """A study as JSON-ready values, without its trials."""
    best = best_trial(snapshot)
    return {
        "study": snapshot.study or place.name,
        "directory": str(place),
        "state": study_state(snapshot, place),
        "metric": snapshot.metric,
        "mode": snapshot.mode,
        "source": snapshot.source,
        "versions": dict(snapshot.versions),
        "total": snapshot.total,
        "finished": snapshot.count(TrialState.FINISHED),
        "pruned": snapshot.count(TrialState.PRUNED),
        "failed": snapshot.count(TrialState.FAILED),
        "seconds": snapshot.seconds,
        "best": best.number if best else None,
        "best_value": best.metrics[snapshot.metric] if best else None,
    }


def full_record(place: Path, snapshot: Snapshot) -> dict[str, Any]:
    """A study as JSON-ready values, with its trials and devices."""
    return study_record(place, snapshot) | {
        "trials": list(map(trial_record, snapshot.trials)),
        "devices": list(map(device_record, snapshot.devices)),
    }


def trial_record(row: TrialRow) -> dict[str, Any]:
    """A trial as JSON-ready values, without its history; ``smooth_loss`` is the one of tables."""
    names = (
        "number seed technique shards step steps seconds device restarts error ended checkpoint"
    )
    record: dict[str, Any] = {name: getattr(row, name) for name in names.split()}
    return record | {
        "hp": dict(row.hp),
        "state": str(row.state),
        "loss": row.loss,
        "smooth_loss": row.smooth_loss,
        "metrics": dict(row.metrics),
        "numerics": dict(row.numerics),
        "trains_as": _trains_as(row),
        "inherited": [taken.to_dict() for taken in row.inherited],
        "replans": [one._asdict() for one in row.replans],
        "recipes": [one._asdict() for one in row.recipes],
    }


def device_record(row: DeviceRow) -> Mapping[str, Any]:
    """A device as JSON-ready values."""
    names = ("name", "kind", "budget_bytes", "peak_bytes", "predicted_bytes", "busy", "restarts")
    return {name: getattr(row, name) for name in names}
