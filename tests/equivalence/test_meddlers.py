"""What code beside the passes of an array changes in what they read: never silently lost."""

from __future__ import annotations

import meddlers
import pytest
import squads
import torch

import shoal
from shoal.core.plan import Plan
from shoal.testing import plain_loop

SCHEDULED = ("temperature", "mode", "global")


def space(odd, **changes):
    return shoal.grid(
        **{"lr": [0.1, 0.03, 0.01], "odd": [odd], "drop": [0.2], "rate": [1.0]} | changes
    )


def assert_close(report, recipe, **loop):
    """Every trial in float64 as the plain loop trains it, but for roundings."""
    for trial in report.trials:
        assert not trial.error, trial.error
        plain = plain_loop(recipe, trial.hp, trial.seed, **loop)
        found = trial.load_state()["model"]
        for name, tensor in plain.model.state_dict().items():
            assert torch.allclose(tensor, found[name], rtol=0, atol=1e-10), (trial.number, name)


@pytest.mark.parametrize(
    ("odd", "changes", "words"),
    [
        ("data", {}, "reading the data changes the global 'meddlers.READ'"),
        ("", {"metrics": {"m": meddlers.meddling}}, "the metric 'm' changes the global"),
        ("global", {"schedule": meddlers.schedule}, "the schedule's step changes the global"),
        ("hidden", {}, "makes one number of a hyperparameter"),
    ],
)
def test_what_passes_read_and_others_change_keeps_trials_from_arrays(
    odd, changes, words, run_study, assert_alone
):
    recipe = meddlers.recipe(**changes)
    report = run_study(recipe, space(odd, rate=[5.0, 0.5]), epochs=3, fuse=3)
    assert squads.widths(report) == [1] * 6
    assert words in " ".join(
        Plan.from_json((report.directory / "plan.json").read_text()).explain().split()
    )
    for trial in report.trials:  # each as if the process had no other one before
        meddlers.READ["factor"] = 1.0
        assert_alone(report, [trial], recipe, epochs=3)


@pytest.mark.sample(4)
@pytest.mark.parametrize("odd", ["temperature", "mode", "optimizer", "hook"])
def test_a_trial_whose_schedule_or_optimizer_changes_its_model_leaves_the_array(odd, run_study):
    recipe = meddlers.recipe(schedule=meddlers.schedule)
    report = run_study(recipe, space(odd), steps=8, eval_every=4, fuse=3)
    assert squads.widths(report) == [1] * 3
    assert_close(report, recipe, steps=8, eval_every=4)
    squads.assert_verified(report, recipe)


def test_a_buffer_that_a_schedule_assigns_stays_in_the_array(run_study):
    recipe = meddlers.recipe(schedule=meddlers.schedule)
    report = run_study(recipe, space("buffer"), steps=8, eval_every=4, fuse=3)
    assert squads.widths(report) == [3] * 3
    assert_close(report, recipe, steps=8, eval_every=4)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("technique", [None, shoal.Spilled(shards=2)])
def test_data_and_model_draw_in_turn_where_gradients_add_up(technique, accumulate, run_study):
    recipe = meddlers.recipe(accumulate=accumulate, model=meddlers.cut)
    report = run_study(recipe, space("noise"), epochs=2, fuse=3, technique=technique)
    assert squads.widths(report) == [3] * 3
    assert_close(report, recipe, epochs=2)
    squads.assert_verified(report, recipe)


def test_an_evaluation_that_raises_ends_its_own_trial_alone(run_study):
    recipe = meddlers.recipe()
    report = run_study(recipe, space("cholesky", rate=[1.0, -1.0]), epochs=2, fuse=6)
    failed = [trial for trial in report.trials if trial.error]
    assert [trial.hp["rate"] for trial in failed] == [-1.0] * 3
    assert all("cholesky" in trial.error for trial in failed)
    assert [t.hp["rate"] for t in report.trials if not t.error] == [1.0] * 3


def test_validation_data_may_have_no_length(run_study, assert_alone):
    recipe = meddlers.recipe()
    report = run_study(recipe, space("stream"), epochs=2)
    assert_alone(report, report.trials, recipe, epochs=2)


def test_a_step_of_ones_own_that_changes_a_global_later_shares_no_array(run_study, assert_alone):
    recipe = meddlers.recipe(loss=None, step=meddlers.step, evaluate=meddlers.evaluate)
    report = run_study(recipe, space(""), epochs=2, fuse=3)
    assert squads.widths(report) == [1] * 3
    assert_alone(report, report.trials, recipe, epochs=2)
