"""A made-up study, as the events that a screen would see of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shoal.core.event import (
    ActionFinished,
    Evaluated,
    Event,
    PeakMeasured,
    StepFinished,
    StudyFinished,
    StudyStarted,
    TrialFailed,
    TrialFinished,
    TrialPlanned,
    TrialStarted,
    WorkerDied,
    WorkerStarted,
)

MIB = 2**20
ERROR = "Traceback (most recent call last):\n  File ...\nValueError: the label 7 is unknown\n"


def make_events(
    trials: int = 8,
    *,
    devices: int = 2,
    steps: int = 20,
    upto: int | None = None,
    failing: tuple[int, ...] = (),
) -> Iterator[Event]:
    """Trials in rounds of two per device; ``upto`` cuts the study after that many steps."""
    specs = tuple(
        {"name": f"cpu:{index}", "kind": "virtual", "memory": 12 * MIB, "threads": 1}
        for index in range(devices)
    )
    yield StudyStarted(
        time=0.0,
        study="sweep",
        metric="valid_loss",
        mode="min",
        trials=trials,
        devices=specs,
        source="sweep.py:study",
        versions={"shoal": "0.1.0"},
    )
    for trial in range(trials):
        yield TrialPlanned(
            time=0.0,
            trial=trial,
            hp={
                "lr": 10 ** -(2 + trial % 3) * 1.7,
                "width": 144 + 16 * (trial % 2),
                "depth": 10,
                "dropout": 0.1 * (trial // 2),
            },
            seed=trial,
            technique="Spilled",
            shards=4 + trial % 3,
            steps=steps,
            peak_bytes=11 * MIB,
            numerics={"threads": 1},
        )
    for spec in specs:
        yield WorkerStarted(time=0.0, device=str(spec["name"]), pid=17)
    yield from _trainings(trials, devices, steps, upto, failing)


def _trainings(
    trials: int, devices: int, steps: int, upto: int | None, failing: tuple[int, ...]
) -> Iterator[Event]:
    taken, now = 0, 1.0
    slots = 2 * devices
    for first in range(0, trials, slots):
        group = range(first, min(trials, first + slots))
        for trial in group:
            yield TrialStarted(time=now, trial=trial, device=f"cpu:{trial % devices}")
        for step in range(1, steps + 1):
            for trial in group:
                if trial in failing and step > 3:
                    continue
                if upto is not None and taken >= upto:
                    return
                taken, now = taken + 1, now + 0.1
                device = f"cpu:{trial % devices}"
                yield ActionFinished(
                    device=device,
                    stream="compute",
                    trial=trial,
                    step=step,
                    action="F(0)",
                    start=now - 0.09,
                    end=now,
                )
                loss = 5.5 - 2.5 * step / steps + 0.01 * trial
                yield StepFinished(
                    time=now,
                    trial=trial,
                    step=step,
                    epoch=1,
                    loss=loss,
                    seconds=0.1,
                    device=device,
                )
                yield PeakMeasured(
                    time=now,
                    device=device,
                    peak_bytes=int(11.3 * MIB),
                    budget_bytes=12 * MIB,
                    predicted_bytes=11 * MIB,
                )
                if trial in failing and step == 3:
                    yield TrialFailed(time=now, trial=trial, step=step, error=ERROR)
                elif step == steps:
                    metrics = {"valid_loss": loss + 0.1}
                    yield Evaluated(time=now, trial=trial, step=step, epoch=1, metrics=metrics)
                    yield TrialFinished(
                        time=now,
                        trial=trial,
                        step=step,
                        metrics=metrics,
                        checkpoint=f"trials/{trial}",
                        seconds=3.0,
                    )
    yield StudyFinished(time=now, finished=trials - len(failing), failed=len(failing), seconds=now)


@pytest.fixture
def study_events() -> Callable[..., Iterator[Event]]:
    """``make_events``, for tests that cannot import this file."""
    return make_events


@pytest.fixture
def a_worker_death() -> WorkerDied:
    """A worker that was killed while it had two trials."""
    return WorkerDied(time=9.0, device="cpu:1", pid=17, reason="killed by signal 9", trials=(1, 3))
