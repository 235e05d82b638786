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


def trial_directory(study: str | os.PathLike[str], trial: int) -> Path:
    """Where a trial's generations and its log lie: named by its number alone."""
    return Path(study) / TRIALS / f"{trial:04d}"


def generation_name(trial: int, generation: str) -> str:
    """A trial's generation as events name it, relative to the study's directory."""
    return f"{TRIALS}/{trial:04d}/{generation}"
