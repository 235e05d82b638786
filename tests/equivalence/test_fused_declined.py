"""Studies that ask for arrays and can have none: trained unfused, to the plain loop's bits."""

from __future__ import annotations

import oddcodes
import pytest
import squads

import shoal
from shoal.core.event import StudyPlanned
from shoal.core.plan import Plan
from shoal.observe import read_outline


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("control flow", "control flow that depends on the data"),
        ("counts", "changes the attribute 'steps'"),
        ("draws", "draws from random"),
    ],
)
def test_code_that_no_array_can_run_trains_unfused_and_the_plan_says_why(
    odd, words, run_study, assert_alone
):
    recipe = oddcodes.recipe()
    report = run_study(recipe, shoal.grid(lr=[0.1, 0.01, 0.03], odd=[odd]), steps=4, fuse=3)
    assert squads.widths(report) == [1] * 3
    assert words in Plan.from_json((report.directory / "plan.json").read_text()).explain()
    (planned,) = (e for e in read_outline(report.directory) if isinstance(e, StudyPlanned))
    (said,) = planned.unfused
    assert said.startswith("3 trials: ")
    assert words in said
    assert_alone(report, report.trials, recipe, steps=4)


def test_what_a_forward_counts_is_for_branches_no_more_than_for_others(run_study, assert_alone):
    """Slots' own passes leave attributes as they were: it counted to 1 in each step."""
    recipe, space = oddcodes.recipe(), shoal.grid(lr=[0.1, 0.01], odd=["counts"])
    report = run_study(recipe, space, steps=4, fuse="2 branches")
    assert squads.widths(report) == [1] * 2
    words = Plan.from_json((report.directory / "plan.json").read_text()).explain()
    assert "changes the attribute 'steps', which an array does not keep for each slot" in words
    assert_alone(report, report.trials, recipe, steps=4)


@pytest.mark.parametrize("odd", ["control flow", "draws"])
def test_branches_take_what_others_decline(odd, run_study):
    recipe, space = oddcodes.recipe(), shoal.grid(lr=[0.1, 0.01], odd=[odd])
    report = run_study(recipe, space, steps=4, fuse="2 branches")
    assert squads.widths(report) == [2] * 2
    squads.assert_near(report.trials, recipe, 1e-12, steps=4)


def test_a_loss_that_mixes_slots_trains_unfused(run_study, assert_alone):
    recipe = oddcodes.recipe(loss=oddcodes.Mixes())
    report = run_study(recipe, shoal.grid(lr=[0.1, 0.01], odd=[""]), steps=4, fuse=2)
    assert squads.widths(report) == [1] * 2
    assert_alone(report, report.trials, oddcodes.recipe(loss=oddcodes.Mixes()), steps=4)


def test_trials_whose_hyperparameters_change_shapes_train_unfused(run_study, assert_alone):
    recipe = oddcodes.recipe(model=oddcodes.shaped)
    report = run_study(recipe, shoal.grid(lr=[0.1], width=[4, 5, 6]), steps=4, fuse="auto")
    assert squads.widths(report) == [1] * 3
    assert_alone(report, report.trials, recipe, steps=4)
