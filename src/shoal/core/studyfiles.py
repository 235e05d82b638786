"""How the files of a study's directory are called."""

from __future__ import annotations

import os
from pathlib import Path

DATABASE = "study.db"  # everything that happened
TIMELINE = "timeline.jsonl"  # every action of every program
RECORD = "study.json"  # what was asked for; what tells a study's directory
PLAN = "plan.json"  # of its last run that made one
LOCK = "lock"  # held by the one process that runs the study
SOCKET = "control.sock"  # orders to that process
RESERVE = "reserve"  # bytes set aside for the end
TRIALS = "trials"


def describe_lost_record(study: str | os.PathLike[str]) -> str:
    """What is wrong with a study's directory that has all but its record, and what to do."""
    return (
        f"{os.fspath(study)} has no {RECORD}, which says what a study was asked for, and has what "
        "one trained. Nothing was changed. Put a copy of that file back, or give the study "
        "another name; shoal show, verify, export and rm take what is there."
    )


def trial_directory(study: str | os.PathLike[str], trial: int) -> Path:
    """Where a trial's generations and its log lie: named by its number alone."""
    return Path(study) / TRIALS / f"{trial:04d}"


def generation_name(trial: int, generation: str) -> str:
    """A trial's generation as events name it, relative to the study's directory."""
    return f"{TRIALS}/{trial:04d}/{generation}"
