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
from shoal.core.units import counted
from shoal.observe import jsonl
from shoal.observe.rows import TrialRow, TrialState
from shoal.observe.snapshot import Snapshot
from shoal.source import keeping_arguments
from shoal.ui.failures import ExitCode
from shoal.ui.show import read_snapshot
from shoal.ui.studies import find_recorded
from shoal.verify import (
    describe_verdict,
    describe_verdicts,
    nothing_compared,
    rows_to_verify,
    settings_of,
    verify_trials,
    warm_clones,
    with_two_recipes,
)

_LEFT_OUT = {
    TrialState.PRUNED: "pruned",
    TrialState.STOPPED: "stopped",
    TrialState.FAILED: "failed",
}


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
    rows = rows_to_verify(place, snapshot, count, trials or ())
    settings = settings_of(snapshot)
    print(_introduction(snapshot, place, rows, chosen=not trials), file=sys.stderr)
    verdicts, out = [], sys.stdout
    # What a model prints is no answer.
    with contextlib.redirect_stdout(sys.stderr), keeping_arguments():
        for row, verdict in zip(rows, verify_trials(place, rows, file=file), strict=True):
            verdicts.append(verdict)
            if not as_json:
                print(describe_verdict(verdict, settings[row.number]), file=out, flush=True)
    if as_json:
        print(jsonl.dumps([asdict(v) | {"equal": v.equal} for v in verdicts], indent=2))
    if all(verdict.skipped for verdict in verdicts):
        raise SpecError(nothing_compared(verdicts))
    if not as_json:
        print(describe_verdicts(verdicts))
    is_proof = all(verdict.equal or verdict.skipped for verdict in verdicts)
    return ExitCode.DONE if is_proof else ExitCode.TRIALS_FAILED


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
