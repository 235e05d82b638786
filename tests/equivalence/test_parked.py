"""A trial that waits for a device has none of its memory, whatever its technique."""

from __future__ import annotations

import pytest
import staging
import traps
from listening import Heard

import shoal
from shoal import Pipelined, Resident, Spilled
from shoal.core.event import TrialParked

TECHNIQUES = [
    Resident(),
    Spilled(shards=3, keep=(0,), optimizer="device"),
    Pipelined(stages=2),
    Pipelined(stages=2, shards=5, optimizer="host", keep=(1,)),
    pytest.param(shoal.DataParallel(width=2), marks=pytest.mark.full),
    pytest.param(shoal.DataParallel(width=2, shard=True), marks=pytest.mark.full),
]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("technique", TECHNIQUES, ids=str)
def test_a_trial_that_waits_refers_to_no_memory_of_the_device(technique, run_study, impatient):
    """The data count what the sessions of its process refer to, and refuse more than one's."""
    heard = Heard()
    report = run_study(
        staging.rich(data=staging.counting_holders, splittable=True, model=normed),
        shoal.grid(lr=[0.01, 0.003, 0.001]),
        technique=technique,
        devices=1 if isinstance(technique, Resident | Spilled) else 3,
        callbacks=[heard],
        epochs=4,
    )
    assert [trial.state for trial in report.trials] == ["FINISHED"] * 3, [
        t.error for t in report.trials
    ]
    assert len(heard.of(TrialParked)) >= 3


def normed(hp):
    """A model with buffers."""
    return traps.Build(traps.Normalized)(hp)
