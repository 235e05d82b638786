"""Planning what a search asks for while others train."""

from __future__ import annotations

import pytest

from shoal.core.errors import PlanError, SpecError, TrialError, WorkerError
from shoal.core.plan import Plan
from shoal.core.spec import TrialSpec
from shoal.core.units import Seconds
from shoal.launch.searching import plan_known_first, plan_some
from shoal.planning import Planned

TRIALS = [TrialSpec(number=number, hp={}, seed=number) for number in range(3)]
NONE = Plan(study="s", devices=(), jobs=(), active=1, rule="", seconds=Seconds(0.0))


def refuse(trials):
    raise TrialError(f"none of {len(trials)} trials can run")


@pytest.mark.parametrize("kind", [PlanError, SpecError, TrialError, WorkerError])
@pytest.mark.parametrize("bad", [{1}, {0, 1, 2}])
def test_who_cannot_run_fails_alone_whoever_is_planned_beside_it(kind, bad):
    def make(trials):
        failures = {t.number: "none" for t in trials if t.number in bad}
        if len(failures) == len(trials):
            raise kind(f"trial {trials[0].number} returned None")
        return Planned(plan=NONE, layouts={}, num_batches={}, failures=failures)

    assert plan_some(make, TRIALS, NONE).failures.keys() == bad
    alone = plan_some(make, TRIALS[1:2], NONE)
    assert alone.failures == {1: f"{kind.__name__}: trial 1 returned None"}


def test_new_points_fail_alone_where_a_trial_that_was_planned_before_can_be_planned_now():
    sound = Planned(plan=NONE, layouts={}, num_batches={}, failures={})
    found = plan_known_first(refuse, TRIALS, {0, 1, 2}, lambda: sound)
    assert found.failures == dict.fromkeys(range(3), "TrialError: none of 1 trials can run")


@pytest.mark.parametrize("new", [(), {1, 2}, {0, 1, 2}])
def test_where_trials_that_were_planned_before_cannot_be_planned_either_all_are_refused(new):
    with pytest.raises(TrialError, match=r"^none of"):
        plan_known_first(refuse, TRIALS, new, lambda: refuse([1]))
