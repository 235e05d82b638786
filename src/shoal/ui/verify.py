"""``shoal verify``: the proof, printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from shoal.core.units import format_seconds
from shoal.observe import jsonl
from shoal.ui.failures import ExitCode
from shoal.ui.show import read_snapshot
from shoal.ui.studies import find_study
from shoal.ui.text import format_value, varying_names
from shoal.verify import TrialVerdict, choose_trials, verify_trials


def verify_study(name: str | None, trials: int, directory: Path, *, as_json: bool) -> int:
    """Retrain ``trials`` finished trials alone; the exit code is 1 if any bit differs."""
    place = find_study(name, directory)
    snapshot = read_snapshot(place)
    rows = choose_trials(snapshot, trials)
    names = varying_names(row.hp for row in snapshot.trials)
    print(
        f"training {len(rows)} of {snapshot.total} trials of {place} again, each alone, "
        "with the plain PyTorch loop",
        file=sys.stderr,
    )
    verdicts = []
    for row, verdict in zip(rows, verify_trials(place, rows), strict=True):
        verdicts.append(verdict)
        if not as_json:
            settings = ", ".join(f"{n}={format_value(row.hp[n])}" for n in names)
            print(describe_verdict(verdict, settings), flush=True)
    if as_json:
        print(jsonl.dumps([asdict(v) | {"equal": v.equal} for v in verdicts], indent=2))
    else:
        print(describe_verdicts(verdicts))
    equal = all(verdict.equal for verdict in verdicts)
    return ExitCode.DONE if equal else ExitCode.TRIALS_FAILED


def describe_verdict(verdict: TrialVerdict, settings: str) -> str:
    """A trial's verdict in one line, and its first difference in a second."""
    word = "EQUAL" if verdict.equal else "DIFFERENT"
    line = (
        f"{word:9}  trial {verdict.number} ({settings}): {verdict.steps} steps, "
        f"{verdict.tensors} tensors, {verdict.losses} losses, {verdict.metrics} metrics; "
        f"alone it took {format_seconds(verdict.plain_s)}"
    )
    return line if verdict.equal else f"{line}\n           first: {verdict.first_difference}"


def describe_verdicts(verdicts: Sequence[TrialVerdict]) -> str:
    """What all of it says."""
    different = sum(not verdict.equal for verdict in verdicts)
    if different:
        return f"{different} of {len(verdicts)} trials differ from training alone"
    return (
        "weights, buffers, optimizer state, schedule, random numbers and every loss: "
        "the same bits as training alone"
    )
