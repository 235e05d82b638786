"""Torch's attention layers evaluate in every technique the way they do alone.

In evaluation they have kernels of their own, which compute to other bits. Whether these are taken
follows from hooks on a layer, from the types of its weights, and from whether query, key and
value are one tensor.
"""

from __future__ import annotations

import attending
import pytest
import staging

import shoal
from shoal import DataParallel, Pipelined, Resident, Spilled
from shoal.core.errors import PlanError
from shoal.recipes.recipe import Recipe
from shoal.verify import verify_trials

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

RECIPE = Recipe(
    model=attending.model,
    data=attending.data,
    loss=attending.loss,
    metrics={"steepness": attending.steepness},
    splittable=True,
)
SHARDED = DataParallel(width=2, shard=True)
FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("technique", "orders"),
    [
        pytest.param(SHARDED, [True], id="sharded"),
        pytest.param(SHARDED, [False], id="sharded, length first", marks=FULL),
        pytest.param(DataParallel(width=2), [True, False], id="replicas", marks=FULL),
        pytest.param(Pipelined(stages=2), [True, False], id="stages", marks=FULL),
        pytest.param(Spilled(shards=3), [True, False], id="spilled", marks=FULL),
        pytest.param(Resident(), [True, False], id="resident", marks=FULL),
    ],
)
def test_attention_trains_and_evaluates_as_alone(technique, orders, run_study):
    cut = isinstance(technique, Pipelined | Spilled)
    kinds = [name for name in attending.KINDS if not (cut and name == "encoder")]
    space = shoal.grid(lr=[1e-2], kind=kinds, batch_first=orders)
    report = run_study(RECIPE, space, technique=technique, devices=2, epochs=1)
    _assert_alone(report)


@pytest.mark.parametrize("technique", [Spilled(shards=3), Pipelined(stages=2)])
def test_what_has_no_shape_cannot_be_cut_and_the_plan_says_what_to_do(technique, run_study):
    space = shoal.grid(lr=[1e-2], kind=["encoder"], batch_first=[True])
    with pytest.raises(PlanError, match="build it with enable_nested_tensor=False"):
        run_study(RECIPE, space, technique=technique, devices=2, epochs=1)


@pytest.mark.full
def test_so_does_one_that_is_frozen_below_a_head(run_study):
    space = shoal.grid(lr=[1e-2], kind=[*attending.KINDS], batch_first=[True], frozen=[True])
    _assert_alone(run_study(RECIPE, space, technique=SHARDED, devices=2, epochs=1))


def _assert_alone(report) -> None:
    for trial in report.trials:
        assert trial.state == "FINISHED", trial.error
    for verdict in verify_trials(report.directory, staging.rows(report), recipe=RECIPE):
        words = f"{report.trials[verdict.number].hp}: {verdict.first_difference}{verdict.failure}"
        assert verdict.equal, words
