"""``shoal verify``: the proof, printed."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from shoal.core.errors import SpecError
from shoal.core.seats import epochs_of
from shoal.core.units import counted, format_seconds, format_value
from shoal.observe import jsonl
from shoal.observe.rows import TrialRow, TrialState
from shoal.observe.snapshot import Snapshot
from shoal.ui.failures import ExitCode
from shoal.ui.show import read_snapshot
from shoal.ui.studies import find_recorded
from shoal.ui.text import varying_names
from shoal.verify import (
    TrialVerdict,
    choose_trials,
    named_trials,
    verify_trials,
    warm_clones,
    with_two_recipes,
    without_state,
)

TRIALS = 2  # that are verified when nobody says how many
_LEFT_OUT = {
    TrialState.PRUNED: "pruned",
    TrialState.STOPPED: "stopped",
    TrialState.FAILED: "failed",
}
_WHOLE = ("weights", "optimizer state", "schedule", "random numbers", "losses", "metrics")


def verify_study(
    name: str | None,
    directory: Path,
    *,
    count: int | None = None,
    trials: Sequence[int] | None = None,
    file: str | None = None,
    as_json: bool = False,
) -> int:
    """Retrain finished trials alone; the exit code is 1 if any bit differs, or one cannot train.

    ``trials`` are chosen by number, and ``count`` more: the best one and others at random.
    """
    place = find_recorded(name, directory)
    snapshot = read_snapshot(place)
    rows = _rows(snapshot, place, count, trials or ())
    names = varying_names(row.hp for row in snapshot.trials)
    print(_introduction(snapshot, place, rows, chosen=not trials), file=sys.stderr)
    verdicts, out = [], sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what a model prints is no answer
        for row, verdict in zip(rows, verify_trials(place, rows, file=file), strict=True):
            verdicts.append(verdict)
            if not as_json:
                hp = {name: row.hp[name] for name in names if name in row.hp}
                settings = ", ".join(f"{name}={format_value(hp[name])}" for name in hp)
                print(describe_verdict(verdict, settings), file=out, flush=True)
    if as_json:
        print(jsonl.dumps([asdict(v) | {"equal": v.equal} for v in verdicts], indent=2))
    if all(verdict.skipped for verdict in verdicts):
        raise SpecError(_nothing(verdicts))
    if not as_json:
        print(describe_verdicts(verdicts))
    is_proof = all(verdict.equal or verdict.skipped for verdict in verdicts)
    return ExitCode.DONE if is_proof else ExitCode.TRIALS_FAILED


def _rows(
    snapshot: Snapshot, place: Path, count: int | None, numbers: Sequence[int]
) -> list[TrialRow]:
    named = named_trials(snapshot, numbers)
    if count is None:
        count = 0 if named else TRIALS
    elif count < 1:
        raise SpecError(f"verify at least one trial, got --trials {count}.")
    if not count:
        return named
    taken = {row.number for row in named}
    leave_out = warm_clones(place) | without_state(place, snapshot)
    leave_out |= with_two_recipes(place, snapshot).keys()
    chosen = choose_trials(snapshot, count + len(named), leave_out=leave_out)
    return [*named, *[row for row in chosen if row.number not in taken][:count]]


def _introduction(
    snapshot: Snapshot, place: Path, rows: Sequence[TrialRow], *, chosen: bool
) -> str:
    taken = {row.number for row in rows}
    left = Counter(row.state for row in snapshot.trials if row.number not in taken)
    words = [f"{left[state]} {what}" for state, what in _LEFT_OUT.items() if left[state]]
    done = {row.number for row in snapshot.trials if row.state is TrialState.FINISHED} - taken
    kinds = {"of two recipes": {*with_two_recipes(place, snapshot)}, "cloned": warm_clones(place)}
    words += [f"{len(done & some)} {what}" for what, some in kinds.items() if done & some]
    left_out = f"; left out: {', '.join(words)} (--trial N takes one)" if words and chosen else ""
    how = "alone, with the plain PyTorch loop"
    if any(epochs_of(row.numerics) for row in rows):
        how = "with nobody beside it: in its slot of an array, or with the plain PyTorch loop"
    return (
        f"training {len(rows)} of {counted(snapshot.total, 'trial')} of {place} again, each "
        f"{how}{left_out}"
    )


def describe_verdict(verdict: TrialVerdict, settings: str) -> str:
    """A trial's verdict in one line, and under it its first difference and its notes."""
    trial = f"trial {verdict.number} ({settings})" if settings else f"trial {verdict.number}"
    if verdict.skipped:
        return f"SKIPPED    {trial}: {verdict.skipped}"
    notes = [f"           note: {note}" for note in verdict.notes]
    if verdict.failure:
        why = f"FAILED     {trial}: it could not be trained alone: {verdict.failure}"
        return "\n".join([why, *notes])
    word = "EQUAL" if verdict.equal else "DIFFERENT"
    random = ", random numbers" if "random numbers" in verdict.compared else ""
    lines = [
        f"{word:9}  {trial}: {counted(verdict.steps, 'step')}, "
        f"{counted(verdict.tensors, 'tensor')}, {counted(verdict.losses, 'loss', 'losses')}, "
        f"{counted(verdict.metrics, 'metric')}{random}{_of_best(verdict)}; alone it took "
        f"{format_seconds(verdict.plain_s)}"
    ]
    if not verdict.equal:
        lines.append(f"           first: {verdict.first_difference}")
    return "\n".join([*lines, *notes])


def _of_best(verdict: TrialVerdict) -> str:
    """What was compared of the state that ``Study(keep_best=True)`` kept beside the last one."""
    if verdict.best_step is None:
        return ""
    tensors = counted(verdict.best_tensors, "tensor")
    return f"; of its best evaluation, after step {verdict.best_step}, {tensors}"


def describe_verdicts(verdicts: Sequence[TrialVerdict]) -> str:
    """What all of it says."""
    done = [verdict for verdict in verdicts if not verdict.skipped]
    if wrong := _wrong(done):
        changed = any("has changed since" in note for verdict in done for note in verdict.notes)
        why = ", with a recipe that has changed since" if changed else ""
        return f"{wrong}{why}"
    has_rule = any("by the rule of" in note for verdict in done for note in verdict.notes)
    has_array = any(note.startswith("in its array") for verdict in done for note in verdict.notes)
    alone = "training alone" + ", by the rule in the notes" * has_rule
    alone += ", each trial in its slot of an array with nobody beside it" * has_array
    common = [name for name in _WHOLE if all(name in (v.compared or _WHOLE) for v in done)]
    if "optimizer state" in common:
        return (
            "weights, buffers, optimizer state, schedule, random numbers and every loss: "
            f"the same bits as {alone}"
        )
    return f"{', '.join(common)}: the same bits as {alone}"


def _wrong(done: Sequence[TrialVerdict]) -> str:
    """How many trials are not proved, and why; empty if all are."""
    different = sum(bool(verdict.first_difference) for verdict in done)
    failed = sum(bool(verdict.failure) for verdict in done)
    words = []
    if different:
        trials = counted(len(done), "trial differs", "trials differ")
        words.append(f"{different} of {trials} from training alone")
    if failed:
        words.append(f"{failed} of {counted(len(done), 'trial')} could not be trained alone")
    return "; ".join(words)


def _nothing(verdicts: Sequence[TrialVerdict]) -> str:
    reasons = "; ".join(f"trial {v.number}: {v.skipped}" for v in verdicts)
    return f"nothing was compared. {reasons}. Choose a trial that finished: --trial N."
