"""Planning what a search asks for while others train."""

from __future__ import annotations

import pytest

from shoal.core.errors import PlanError, SpecError, TrialError, WorkerError
from shoal.core.plan import Plan
from shoal.core.spec import TrialSpec
from shoal.core.units import Seconds
from shoal.launch.searching import plan_some
from shoal.planning import Planned

TRIALS = [TrialSpec(number=number, hp={}, seed=number) for number in range(3)]


@pytest.mark.parametrize("kind", [PlanError, SpecError, TrialError, WorkerError])
@pytest.mark.parametrize("bad", [{1}, {0, 1, 2}])
def test_who_cannot_run_fails_alone_whoever_is_planned_beside_it(kind, bad):
    plan = Plan(study="s", devices=(), jobs=(), active=1, rule="", seconds=Seconds(0.0))

    def make(trials):
        failures = {t.number: "none" for t in trials if t.number in bad}
        if len(failures) == len(trials):
            raise kind(f"trial {trials[0].number} returned None")
        return Planned(plan=plan, layouts={}, num_batches={}, failures=failures)

    assert plan_some(make, TRIALS, plan).failures.keys() == bad
    alone = plan_some(make, TRIALS[1:2], plan)
    assert alone.failures == {1: f"{kind.__name__}: trial 1 returned None"}
