"""Replicas as a study plans them: what is settled, what is said, and what is refused."""

from __future__ import annotations

import pytest
import staging
import traps
import twins
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import shoal
from shoal import DataParallel
from shoal.core.errors import PlanError, SpecError
from shoal.core.plan import Plan
from shoal.core.spec import JobMeasure
from shoal.core.technique import Pipelined
from shoal.execution.ladder import techniques
from shoal.planning import early, technique_on_record
from shoal.runtime.pool import WorkerPool

DDP, FSDP = DataParallel(width=2), DataParallel(width=2, shard=True)


@pytest.fixture
def plan(tmp_path, warm_workers):
    """Plan one trial of a recipe."""

    def plan(
        recipe, technique, *, devices=2, memory="64MiB", workers=warm_workers, **options
    ) -> Plan:
        study = shoal.Study("p", recipe, space=twins.LR, directory=tmp_path, steps=2, **options)
        hardware = shoal.Hardware.virtual(devices, memory=memory)
        shown = {"progress": False, "workers": workers}
        return study.plan(hardware=hardware, technique=technique, **shown)

    return plan


def validated_on_40(hp):
    return traps.batches([8] * 4), traps.batches([40], 30)


def validated_on_400(hp):
    return traps.batches([8] * 4), traps.batches([400], 30)


# -- what is settled ------------------------------------------------------------------------


def test_a_plan_says_who_holds_what_and_what_is_sent(plan):
    found = plan(twins.recipe(data=staging.even), DDP)
    (job,) = found.jobs
    assert (job.technique, job.gang, found.active) == (DDP, 2, 1)
    assert Plan.from_json(found.to_json()) == found
    words = found.explain()
    for part in (
        "2 replicas, a device each, DDP: each holds and steps all of the model",
        "each computes 2 of its 4 rows",
        "that each sends",
        "on one device, resident, a step would take",
        "a mean over rows",
        "replicas=2",
    ):
        assert part in words, words


@pytest.mark.sample(1)
@pytest.mark.parametrize("technique", [DataParallel(width=3), DataParallel(width=3, shard=True)])
def test_the_first_replica_has_a_validation_batch_for_each(technique, plan):
    """Ten times as many rows are ten times the bytes, of all three."""
    held = []
    for data in (validated_on_40, validated_on_400):
        (job,) = plan(twins.recipe(data=data), technique, devices=3).jobs
        held.append(job.held_bytes)
    (batch,) = validated_on_40({})[1]
    assert held[1] - held[0] == 3 * 9 * sum(tensor.nbytes for tensor in batch)


def test_shards_hold_less_than_wholes(plan):
    recipe = twins.rich(1, model=staging.wide, data=staging.many_rows)
    held = [plan(recipe, t, devices=4).jobs[0].held_bytes for t in (DDP, FSDP)]
    assert held[1] < 0.5 * held[0]


def test_the_width_is_the_devices_or_the_rows(plan):
    recipes = twins.recipe(data=staging.even), twins.recipe(data=two_rows)
    widths = [plan(recipe, DataParallel(), devices=3).jobs[0].gang for recipe in recipes]
    assert widths == [3, 2]


def test_what_fits_in_shards_alone_says_so(plan):
    recipe = twins.rich(1, model=staging.wide, data=staging.many_rows)
    with pytest.raises(
        PlanError, match=r"a replica needs .* Use shoal.DataParallel\(shard=True\)"
    ):
        plan(recipe, DataParallel(width=4), devices=4, memory="1MiB")
    assert plan(recipe, DataParallel(width=4, shard=True), devices=4, memory="1MiB").jobs


def test_only_what_changes_bits_is_in_the_key(plan):
    def key(technique, **changes):
        recipe = twins.recipe(twins.Still, optimizer=traps.momentum, **changes)
        return dict(plan(recipe, technique).jobs[0].numerics)

    plain = key(DDP)
    assert key(FSDP) == plain
    assert (plain["replicas"], plain.get("draws"), plain.get("buffers")) == (2, None, None)
    assert key(FSDP, clip_grad_norm=1.0)["sums"] == "by shards"
    assert key(FSDP, accumulate=2)["sums"] == "by shards"
    assert "sums" not in key(DDP, accumulate=2, clip_grad_norm=1.0)


def test_draws_and_buffers_are_in_the_key(plan):
    key = plan(twins.recipe(twins.Normal), DDP).jobs[0].numerics
    assert key["buffers"] == "those of replica 0"
    assert plan(twins.recipe(), DDP).jobs[0].numerics["draws"] == "each replica its own"


def test_nobody_gets_replicas_unasked(plan):
    (job,) = plan(twins.recipe(data=staging.even), None).jobs
    assert job.gang == 1


def test_a_key_on_record_says_how_to_go_on():
    assert technique_on_record([{"replicas": 3}]) == DataParallel(width=3)
    assert technique_on_record([{"replicas": 2, "sums": "by shards"}]) == FSDP
    assert technique_on_record([{"weights": "one step old"}]) == Pipelined(schedule="2bw")
    assert technique_on_record([{}]) is None


def test_who_outgrows_its_memory_is_divided_next():
    assert list(techniques(DDP, 1, "device", has_neighbours=False)) == [FSDP]
    assert list(techniques(FSDP, 1, "device", has_neighbours=False)) == []


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"width": 1}, {"width": 2.0}, {"shard": "fsdp"}, {"shard": 1}])
def test_values_that_mean_nothing(asked):
    with pytest.raises(SpecError, match="DataParallel"):
        DataParallel(**asked)


@pytest.mark.parametrize(
    ("changes", "technique", "devices", "words"),
    [
        ({}, DataParallel(width=3), 2, "with 3 replicas takes a device for each, and there are 2"),
        ({}, DataParallel(), 1, "there is 1"),
        ({"splittable": False}, DDP, 2, r"Recipe\(splittable=True\)"),
        ({"precision": "bf16-sr"}, DDP, 2, "cannot be data-parallel"),
        ({"loss_rows": 2}, FSDP, 2, "loss_rows=2"),
    ],
)
def test_what_is_impossible_whatever_the_model_is(changes, technique, devices, words):
    specs = shoal.Hardware.virtual(devices, memory="1MiB").devices
    with pytest.raises(PlanError, match=words):
        early(technique, twins.recipe(**changes), specs)


def two_rows(hp):
    return traps.batches([2, 2]), None


def no_rows(hp):
    return [(x, y, y[:1]) for x, y in traps.batches([4, 4])], None


def features(batch):
    return (batch[0],)


@pytest.mark.parametrize(
    ("changes", "technique", "words"),
    [
        ({"data": two_rows}, DataParallel(width=3), "first batch has 2 rows, and each of 3 "),
        ({"data": no_rows, "inputs": features}, DDP, "do not have rows in common"),
        ({"loss": twins.summed}, DDP, "the loss is no mean over rows"),
        ({"optimizer": twins.halves}, FSDP, "steps rows of '.*' otherwise than all of it"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_numbers(changes, technique, words, plan):
    with pytest.raises(PlanError, match=words):
        plan(twins.recipe(**changes), technique, devices=3)


def test_a_loss_that_is_nearly_a_mean_is_said(plan):
    words = plan(twins.recipe(loss=twins.sharpened), DDP).explain()
    assert "not quite a mean over rows" in words


@pytest.mark.full
class Unfreezes(LambdaLR):
    def step(self):
        super().step()
        if self.last_epoch == 3:
            for parameter in self.optimizer.param_groups[0]["params"]:
                parameter.requires_grad_(True)


def test_a_schedule_that_may_unfreeze_is_said_to_end_the_trial_then(plan):
    def schedule(optimizer, hp):
        return Unfreezes(optimizer, lambda step: 1.0)

    words = plan(twins.recipe(schedule=schedule), DDP).explain()
    assert "its schedule's code names requires_grad: where it unfreezes a parameter the" in words


def test_compiled_models_are_refused(plan):
    import torch

    recipe = twins.recipe(model=lambda hp: torch.compile(nn.Sequential(nn.Linear(12, 3))))
    with (
        WorkerPool() as workers,  # one that has compiled takes all that comes after for compiled
        pytest.raises(PlanError, match="its model is compiled"),
    ):
        plan(recipe, DDP, workers=workers)


def test_a_measure_has_no_replica_unless_asked():
    assert JobMeasure.__dataclass_fields__["replica"].default is None
