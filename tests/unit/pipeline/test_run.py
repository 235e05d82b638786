"""What cannot be trained in stages is refused before it starts, with the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.core.errors import PlanError, SpecError
from shoal.pipeline.processes import StageProcesses
from shoal.pipeline.run import run_stages
from shoal.recipes.recipe import Recipe


def model(hp):
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def one_layer(hp):
    return nn.Linear(4, 4)


def data(hp):
    return [torch.ones(2, 4)] * 6, None


def loss(output, batch):
    return output.mean()


def recipe(**changes):
    return Recipe(**({"model": model, "data": data, "loss": loss, "accumulate": 3} | changes))


def refused(crew=None, *, stages=2, changes=None, **how):
    with pytest.raises((SpecError, PlanError)) as caught:
        run_stages(
            recipe(**(changes or {})),
            {"lr": 0.1},
            0,
            steps=2,
            stages=stages,
            processes=crew,
            **how,
        )
    return str(caught.value)


def test_2bw_needs_as_many_micro_batches_as_stages():
    said = refused(stages=4, schedule="2bw")
    assert "2bw with 4 stages needs 4 micro-batches a step or more, got 3" in said
    assert "Recipe(accumulate=4)" in said


@pytest.mark.full
def test_a_short_last_group_counts_as_what_it_is(stage_processes):
    def five(hp):
        return [torch.ones(2, 4)] * 5, None

    said = refused(stage_processes, stages=3, schedule="2bw", changes={"data": five})
    assert "needs 3 micro-batches a step or more, got 2" in said


@pytest.mark.full
def test_more_stages_than_layers_are_refused_with_both_numbers(stage_processes):
    with StageProcesses(8) as crew:
        said = refused(crew, stages=8)
    assert "cannot cut 5 layers into 8 shards" in said


def test_more_stages_than_processes_are_refused(stage_processes):
    said = refused(stage_processes, stages=5)
    assert "5 stages were asked for, and there are processes for 4" in said


@pytest.mark.parametrize(
    "cuts",
    [
        (1,),
        *(pytest.param(cuts, marks=pytest.mark.full) for cuts in ((3, 2), (1, 1), (0, 2), (1, 5))),
    ],
)
def test_cuts_that_make_other_stages_are_refused(cuts, stage_processes):
    assert "3 stages need 2 cuts" in refused(stage_processes, stages=3, cuts=cuts)


def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(stage_processes):
    said = refused(stage_processes, changes={"model": one_layer})
    assert "the model cannot be cut into shards" in said
    assert "Train this model on one device." in said


def test_a_guess_needs_stale_weights():
    assert "'flush' are not stale" in refused(predict=True)


def test_rounded_steps_are_refused():
    assert "cannot be pipelined" in refused(changes={"precision": "bf16-sr"})


@pytest.mark.parametrize("how", [{"schedule": "1f1b"}, {"lag": -1}])
def test_schedules_that_are_none_are_refused(how):
    assert refused(**how)


def test_nothing_to_train_is_refused():
    with pytest.raises(SpecError, match="at least one step"):
        run_stages(recipe(), {"lr": 0.1}, 0, steps=0, stages=2)


def test_an_epoch_that_ends_within_a_step_is_told(stage_processes):
    class Unsized:
        def __iter__(self):
            return iter([torch.ones(2, 4)] * 4)

    def unsized(hp):
        return Unsized(), None

    with pytest.raises(Exception, match="an epoch of train data ended within step 2"):
        run_stages(
            recipe(data=unsized), {"lr": 0.1}, 0, steps=3, stages=2, processes=stage_processes
        )
