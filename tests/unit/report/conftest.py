"""A study's directory as a run leaves it, made of events."""

import pytest

from shoal.core.event import (
    Evaluated,
    PeakMeasured,
    StepFinished,
    StudyFinished,
    StudyStarted,
    TrialFailed,
    TrialFinished,
    TrialPlanned,
    TrialStarted,
)
from shoal.observe import Database

TRACEBACK = "Traceback (most recent call last):\n  ...\nValueError: width 96 does not divide 128\n"


def planned(trial, **hp):
    return [
        TrialPlanned(
            time=1.0 + trial, trial=trial, hp=hp, seed=trial, technique="Spilled", shards=3,
            steps=10, peak_bytes=9_000_000, numerics={},
        ),
        TrialStarted(time=1.0 + trial, trial=trial, device="cpu:0"),
        StepFinished(
            time=2.0 + trial, trial=trial, step=1, epoch=0, loss=2.5, seconds=1.0, device="cpu:0"
        ),
    ]  # fmt: skip


def ended(trial, seconds, **metrics):
    checkpoint = f"trials/{trial:04d}/step-00000010"
    return [
        Evaluated(time=20.0 + trial, trial=trial, step=10, epoch=1, metrics=metrics),
        TrialFinished(
            time=20.0 + trial, trial=trial, step=10, metrics=metrics, checkpoint=checkpoint,
            seconds=seconds,
        ),
    ]  # fmt: skip


def study_events(metric="valid_loss", mode="min", source="", arguments=()):
    return [
        StudyStarted(
            time=0.0, study="digits", metric=metric, mode=mode, trials=5,
            devices=({"name": "cpu:0", "kind": "virtual", "memory": 12 << 20, "threads": 1},),
            source=source, versions={}, arguments=arguments,
        ),
        *planned(0, lr=1e-3, width=64),
        *planned(1, lr=1 / 3000, width=128),
        *planned(2, lr=1.0, width=96),
        *planned(3, lr=10.0, width=64),
        PeakMeasured(
            time=9.0, device="cpu:0", peak_bytes=11 << 20, budget_bytes=12 << 20,
            predicted_bytes=11_600_000,
        ),
        *ended(0, 20.34, valid_loss=0.5, valid_accuracy=0.75),
        *ended(1, 25.0, valid_loss=0.25, valid_accuracy=0.5),
        TrialFailed(time=22.0, trial=2, step=3, error=TRACEBACK),
        *ended(3, 21.0, valid_loss=float("nan"), valid_accuracy=0.1),
        StudyFinished(time=65.5, finished=3, failed=1, seconds=65.5),
    ]  # fmt: skip


@pytest.fixture
def make_dir(tmp_path):
    def make(events=None, **changes):
        with Database(tmp_path) as log:
            log.write(study_events(**changes) if events is None else events)
        return tmp_path

    return make
