"""What later stages draw is drawn ahead, where that comes to the same random state."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from shoal.core.errors import TrialError
from shoal.partition.build import build_chain
from shoal.pipeline.foretell import Foretelling
from shoal.pipeline.run import run_stages
from shoal.recipes.recipe import Recipe
from shoal.rng import capture_rng, restore_rng, same_rng
from shoal.testing import compare, plain_loop


class Draws(nn.Module):
    """Dropout, noise, and what ``extra`` adds to it."""

    def __init__(self, extra: str) -> None:
        super().__init__()
        self.layer, self.dropout, self.extra = nn.Linear(6, 6), nn.Dropout(0.3), extra

    def forward(self, x):
        x = self.dropout(self.layer(x)) + torch.randn_like(x)
        if self.extra == "python":
            x = x * random.random()
        if self.extra == "values" and float(x.detach().sum()) > 0:
            x = x + torch.rand(2)[0]
        return x


def model(hp, extra=""):
    return nn.Sequential(*(Draws(extra) for _ in range(4)))


def python(hp):
    return model(hp, "python")


def values(hp):
    return model(hp, "values")


def data(hp):
    generator = torch.Generator().manual_seed(2)
    sizes = (4, 4, 3, 4, 5, 4)
    return [torch.randn(size, 6, generator=generator) for size in sizes], None


def loss(output, batch):
    return output.square().mean()


def recipe(build=model):
    return Recipe(model=build, data=data, loss=loss, accumulate=3)


def foretelling_of(build):
    torch.manual_seed(0)
    made, batch = build({}).train(), data({})[0][0]
    chain = build_chain(made, recipe(build), batch, torch.device("cpu"))
    return Foretelling(chain, 2), batch


def test_it_works_where_torch_draws_and_leaves_the_streams_alone():
    foretelling, batch = foretelling_of(model)
    before = capture_rng()
    assert foretelling.works(batch)
    assert same_rng(before, capture_rng())


def test_it_does_not_where_python_draws():
    foretelling, batch = foretelling_of(python)
    assert not foretelling.works(batch)


@pytest.mark.sample(2)
@pytest.mark.parametrize("build", [model, python])
@pytest.mark.parametrize("foretell", [False, True])
def test_either_way_the_bits_are_the_plain_loops(build, foretell, stage_processes):
    how = {"stages": 3, "schedule": "flush", "foretell": foretell, "processes": stage_processes}
    trained = run_stages(recipe(build), {"lr": 0.01}, 4, steps=4, **how)
    assert trained.pipeline.draws
    assert trained.pipeline.foretold == (foretell and build is model)
    assert trained.most_in_flight[0] == 3  # forwards go ahead of backwards either way
    plain = plain_loop(recipe(build), {"lr": 0.01}, 4, steps=4)
    found = compare(plain, trained.state, losses=trained.losses)
    assert found.equal, found.first_difference


@pytest.mark.full
def test_draws_that_depend_on_values_are_found_out(stage_processes):
    how = {"stages": 3, "schedule": "flush", "processes": stage_processes}
    with pytest.raises(TrialError, match=r"Use foretell=False"):
        run_stages(recipe(values), {"lr": 0.01}, 4, steps=20, **how)
    trained = run_stages(recipe(values), {"lr": 0.01}, 4, steps=4, foretell=False, **how)
    plain = plain_loop(recipe(values), {"lr": 0.01}, 4, steps=4)
    assert compare(plain, trained.state, losses=trained.losses).equal


class Lender:
    """Has the weights of the layers that run, and NaN in the place of all others."""

    def __init__(self, chain):
        self.chain, self.lent, self.most = chain, 0, 0
        self.values = {name: p.data for name, p in chain.model.named_parameters()}
        for parameter in chain.model.parameters():
            parameter.data = torch.full((), float("nan")).expand(parameter.shape)

    @contextmanager
    def __call__(self, layers):
        params = dict(self.chain.model.named_parameters())
        names = self.chain.parameters_in(layers.start, layers.stop)
        before = {name: params[name].data for name in names}
        for name in names:
            params[name].data = self.values[name]
        self.lent += len(names)
        self.most = max(self.most, self.lent)
        yield
        self.lent -= len(names)
        for name in names:
            params[name].data = before[name]


def test_a_layers_weights_are_enough_at_a_time():
    torch.manual_seed(0)
    made, batch = model({}).train(), data({})[0][0]
    chain = build_chain(made, recipe(), batch, torch.device("cpu"))
    lender, before = Lender(chain), capture_rng()
    foretelling = Foretelling(chain, 2, lender)
    assert foretelling.look(batch) == (True, True)
    assert same_rng(before, capture_rng())
    assert (lender.lent, lender.most) == (0, 2)  # a weight and a bias
    foretelling.draw_on(batch[:3])  # another form is looked at in the same way
    assert (lender.lent, lender.most) == (0, 2)
    assert not same_rng(before, capture_rng())


def test_with_copies_the_first_stages_draws_are_foretold_with_a_layers_weights():
    torch.manual_seed(0)
    made, batch = model({}).train(), data({})[0][0]
    chain = build_chain(made, recipe(), batch, torch.device("cpu"))
    before = capture_rng()
    made(batch)
    after = capture_rng()
    lender = Lender(chain)
    foretelling = Foretelling(chain, 2, lender, whole=True)
    restore_rng(before)
    assert foretelling.look(batch) == (True, True)
    assert (lender.lent, lender.most) == (0, 2)
    foretelling.draw_on(batch)
    assert same_rng(after, capture_rng())


def test_a_model_that_draws_nothing_is_seen_to_draw_nothing():
    made, batch = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).train(), data({})[0][0]
    chain = build_chain(made, recipe(), batch, torch.device("cpu"))
    assert not Foretelling(chain, 2).look(batch).draws
