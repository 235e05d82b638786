"""A replica that is sent away leaves nothing on the device, whatever it was in the middle of."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.device import open_device
from shoal.memory.store import Region, create_region, describe
from shoal.recipes.recipe import Recipe
from shoal.replicas import cut_for_replicas
from shoal.runtime.gangs.group import GangGroup, NoWays, joined
from shoal.runtime.gangs.replica import Replica
from shoal.runtime.placing.layouts import layout_of
from shoal.runtime.saving.checkpoint import new_session
from shoal.runtime.wire.messages import Settings
from shoal.testing import make_device, make_job

CPU = torch.device("cpu")


def model(hp):
    layers = [nn.Linear(16, 16) for _ in range(3)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def data(hp):
    return [(torch.randn(4, 16), torch.randn(4, 16)) for _ in range(3)], None


def loss(output, batch):
    return F.mse_loss(output, batch[1])


@pytest.fixture(params=[False, True], ids=["ddp", "fsdp"])
def session(request):
    """A trial with replicas, in a region of its own."""
    recipe = Recipe(model=model, data=data, loss=loss)
    job = make_job(technique=shoal.DataParallel(width=2, shard=request.param), hp={"lr": 0.1})
    settings = Settings(
        steps=3,
        epochs=None,
        eval_every=None,
        directory=".",
        checkpoint_every_s=0.0,
        timeline=False,
    )
    made = new_session(recipe, job, settings, CPU)
    keys = ("exp_avg", "exp_avg_sq")
    states = {n: [describe(n, p, k) for k in keys] for n, p in made.model.named_parameters()}
    layout = layout_of((0, 1), None, made.model, states)
    descriptor = create_region("a test", layout.num_bytes)
    made.place(layout, Region(descriptor, layout.num_bytes), fresh=True)
    os.close(descriptor)
    yield made
    made.close()


def held_by(session):
    """Bytes of all memory that a trial's tensors refer to."""
    parameters = list(session.binding.params.values())
    entries = [session.optimizer.state.get(p, {}) for p in parameters]
    tensors = [v for entry in entries for v in entry.values() if isinstance(v, torch.Tensor)]
    tensors += [t for p in parameters for t in (p.data, p.grad) if t is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_its_session_refers_to_nothing_when_it_was_dismissed_without_storing(session, count):
    rows = cut_for_replicas(next(iter(session.train)), 2)[0]
    with joined(GangGroup(0, 2, NoWays())):
        replica = Replica(session, 0, open_device(make_device()))
        units = (lambda: replica.backward(rows, last=True), replica.finish, replica.step)
        for unit in units[:count]:
            unit()
        assert held_by(session) > 3 * 16 * 8 * 4
        replica.close()
    assert held_by(session) < 3 * 16 * 4  # numbers of one element


def test_what_it_stored_stays_where_it_was_stored(session):
    stored = session.region.bytes.clone()
    with joined(GangGroup(0, 2, NoWays())):
        replica = Replica(session, 0, open_device(make_device()))
        replica.store(leaves=True)
        replica.close()
    assert torch.equal(session.region.bytes, stored)


def test_where_there_is_no_validation_data_an_evaluation_says_what_a_lone_trials_would(session):
    told = []
    session.on_evaluated = told.append
    session.tally.add({"fake": 2.0})
    assert list(session._evaluate()) == []
    assert told == [session.metrics] == [{"train_fake": 2.0}]
