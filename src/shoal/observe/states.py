"""The states of a study and of its trials in words: the same ones wherever they are printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from shoal.observe.lock import is_running
from shoal.observe.reader import read_outline
from shoal.observe.rows import TrialRow, TrialState
from shoal.observe.snapshot import Snapshot

STATES = {
    TrialState.PENDING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.FINISHED: "finished",
    TrialState.FAILED: "failed",
    TrialState.STOPPED: "stopped",
    TrialState.PRUNED: "pruned",
}
_STANDS = ("stopped", "paused", "interrupted", "finished")
_ORDER = (
    *("running", "waiting", "paused", "interrupted", "not begun"),
    *("finished", "pruned", "stopped", "failed"),
)


def study_state(snapshot: Snapshot, place: Path) -> str:
    """In a word: finished, stopped (it said why), paused, running, or interrupted; planning, or
    not begun, where nothing is on record.

    An interrupted study is one whose process died: nobody holds its lock.
    """
    if not snapshot.runs:
        return "planning" if is_running(place) else "not begun"
    said = state_on_record(snapshot)
    if said != "running":
        return said
    return said if is_running(place) or _has_ended_since(place) else "interrupted"


def state_on_record(snapshot: Snapshot) -> str:
    """The same of a study whose process is there, or said how it ended."""
    if snapshot.is_finished:
        return "stopped" if snapshot.stopped else "finished"
    return "paused" if snapshot.is_paused else "running"


def _has_ended_since(place: Path) -> bool:
    """Whether a study that was read unfinished, and has no process now, ended in between."""
    return Snapshot.of(read_outline(place)).is_finished


def trial_state(row: TrialRow, study: str) -> str:
    """A trial's state in a word, where its study's is ``study``: in one that stands none waits."""
    if row.state is TrialState.RUNNING and study == "interrupted":
        return study
    if row.state is TrialState.PENDING and study in _STANDS:
        return "paused" if row.step else "not begun"
    return STATES[row.state]


def counts_of(snapshot: Snapshot) -> str:
    """How many trials are in each state that some are in, of a study whose process is there."""
    study = state_on_record(snapshot)
    counts = Counter(trial_state(row, study) for row in snapshot.trials)
    counts[trial_state(TrialRow(number=0), study)] += max(0, snapshot.total - len(snapshot.trials))
    return in_order(counts) or "no trials"


def in_order(counts: Mapping[str, int]) -> str:
    """How many are in each state, those first that have not ended."""
    return ", ".join(f"{counts[word]} {word}" for word in _ORDER if counts.get(word))
