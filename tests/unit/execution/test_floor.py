"""What every part of a run shares: of trials that have ended little is left."""

from __future__ import annotations

from types import SimpleNamespace

from shoal.execution.floor import Floor
from shoal.execution.trial import TrialRun
from shoal.testing import make_job


def test_nothing_of_a_trials_last_step_is_held_once_it_has_ended():
    plan = SimpleNamespace(rule="", active=1, devices=())
    pool = SimpleNamespace(workers={})
    floor = Floor(plan, pool, None, lambda events: None, lambda: False)
    state = TrialRun(job=make_job(0), layout=None, total=4, progress=SimpleNamespace(step=4))
    floor.states[0] = state
    floor.open.add(0)
    floor.begin(state)
    floor.end(state)
    assert state.progress is None
