"""A small study's events, told the way workers tell them."""

import pytest

from shoal.core.event import (
    ActionFinished,
    Evaluated,
    StepFinished,
    StudyStarted,
    TrialPlanned,
    TrialStarted,
)


class Teller:
    """Makes events; its clock moves with every one."""

    def __init__(self):
        self.time = 1000.0

    def _next(self, seconds):
        self.time += seconds
        return self.time

    def study(self, trials=2, devices=1, metric="valid_loss", mode="min"):
        specs = tuple(
            {"name": f"cpu:{i}", "kind": "virtual", "memory": 2**28, "threads": 1}
            for i in range(devices)
        )
        return StudyStarted(
            time=self._next(0), study="digits", metric=metric, mode=mode, trials=trials,
            devices=specs, source="", versions={"torch": "2.13"},
        )  # fmt: skip

    def planned(self, trial, steps=4, **hp):
        return TrialPlanned(
            time=self._next(0), trial=trial, hp=hp or {"lr": 0.1}, seed=trial,
            technique="Resident", shards=1, steps=steps, peak_bytes=100, numerics={"threads": 1},
        )  # fmt: skip

    def started(self, trial, device="cpu:0"):
        return TrialStarted(time=self._next(0), trial=trial, device=device)

    def step(self, trial, step, loss=1.0, epoch=0, seconds=1.0, device="cpu:0", per_epoch=None):
        return StepFinished(
            time=self._next(seconds), trial=trial, step=step, epoch=epoch, loss=loss,
            seconds=seconds, device=device, steps_per_epoch=per_epoch,
        )  # fmt: skip

    def evaluated(self, trial, step, epoch=0, **metrics):
        return Evaluated(time=self._next(0), trial=trial, step=step, epoch=epoch, metrics=metrics)

    def action(self, start, end, action="F s0 m0", trial=0, device="cpu:0", stream="compute"):
        return ActionFinished(
            device=device, stream=stream, trial=trial, step=1, action=action,
            start=1000.0 + start, end=1000.0 + end,
        )  # fmt: skip


@pytest.fixture
def tell():
    return Teller()
