"""What pipelines of studies got wrong once, each found by a reader of the code."""

from __future__ import annotations

import pitfalls
import pytest
import staging

import shoal
from shoal.core.errors import PlanError
from shoal.core.technique import Pipelined
from shoal.recipes.recipe import Recipe


def recipe(**changes) -> Recipe:
    settings = {"model": pitfalls.build, "data": pitfalls.data, "loss": pitfalls.loss}
    return Recipe(**(settings | {"accumulate": 2} | changes))


def space(kind: str):
    return shoal.grid(kind=[kind], lr=[0.01])


@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_a_forward_that_draws_between_its_blocks(schedule, run_study):
    """The random states of its recomputes travel in messages, as views of their frames."""
    technique = Pipelined(stages=2, schedule=schedule, cuts=(6,))
    report = run_study(recipe(), space("DrawsBetween"), technique=technique, devices=2, steps=6)
    staging.assert_staged(report, recipe(), technique, steps=6)


@pytest.mark.slow
@pytest.mark.parametrize("eval_every", [1, 3])
def test_tied_weights_of_2bw_at_every_generation(eval_every, run_study):
    """A stop with an odd number of steps behind it exchanged the versions of what is borrowed."""
    technique = Pipelined(stages=2, schedule="2bw")
    loop = {"steps": 7, "eval_every": eval_every}
    report = run_study(
        recipe(), space("Tied"), technique=technique, devices=2, checkpoint_every=0.001, **loop
    )
    staging.assert_staged(report, recipe(), technique, **loop)


def test_a_buffer_that_changes_after_the_first_forward(run_study):
    technique = Pipelined(stages=3)
    report = run_study(recipe(), space("CountsLate"), technique=technique, devices=3, steps=6)
    staging.assert_staged(report, recipe(), technique, steps=6)
    (trial,) = report.trials
    assert trial.load_state()["model"]["blocks.3.3.largest"] > 1.5


def test_draws_of_an_evaluation_are_refused_before_the_start(run_study):
    technique = Pipelined(stages=2)
    with pytest.raises(PlanError, match="while it is evaluated"):
        run_study(recipe(), space("DrawsWhenEvaluated"), technique=technique, devices=2, steps=2)


def test_a_guess_of_tied_weights_is_not_evaluated(run_study):
    technique = Pipelined(stages=2, schedule="2bw", predict=True)
    with pytest.raises(PlanError, match="weights in common"):
        run_study(recipe(), space("Tied"), technique=technique, devices=2, steps=2)


@pytest.mark.parametrize("kind", ["FindsAttribute", "FindsBuffer"])
@pytest.mark.parametrize("technique", [Pipelined(stages=2), Pipelined(stages=2, shards=3)])
def test_what_a_block_finds_of_another_stages_is_refused(kind, technique, run_study):
    """Each stage has a model of its own, where it found what was there at first."""
    with pytest.raises(PlanError, match="reads something that layers before it leave"):
        run_study(recipe(), space(kind), technique=technique, devices=2, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_an_optimizer_that_gives_parameters_other_memory(schedule, run_study):
    """What it gave them was forgotten, and they stayed as they were."""
    technique, of = Pipelined(stages=2, schedule=schedule), recipe(optimizer=pitfalls.assigns)
    report = run_study(of, space("DrawsBetween"), technique=technique, devices=2, steps=6)
    staging.assert_staged(report, of, technique, steps=6)


def test_a_loss_that_counts_its_steps(run_study):
    """Looking for the chain of a stage's model ran it a few times more."""
    technique, of = Pipelined(stages=2), recipe(loss=pitfalls.Halving())
    report = run_study(of, space("DrawsBetween"), technique=technique, devices=2, steps=10)
    staging.assert_staged(report, of, technique, steps=10)


def test_what_later_stages_keep_in_python_goes_on_with_the_trial(interrupted):
    """What a hook and a loss kept there was the first stage's, where neither runs."""
    technique, of = Pipelined(stages=2), recipe(loss=pitfalls.Halving())
    report = interrupted(of, technique, technique, space=space("Steadied"), epochs=4)
    staging.assert_staged(report, of, technique, epochs=4)
