"""Chains that trials of equal code and shapes share."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shoal
from shoal.core.spec import HyperParameters
from shoal.partition.build import build_chain
from shoal.partition.drive import every_layer, sharded_backward
from shoal.runtime.measuring.chains import Chains, chain_of
from shoal.runtime.measuring.firstbatches import FEW_ROWS, first_rows

CPU = torch.device("cpu")
BATCH = (torch.ones(4, 8), torch.zeros(4, dtype=torch.long))


class Skips(nn.Module):
    """Its forward differs by what no parameter shows."""

    def __init__(self, skip=False, rate=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.skip, self.rate = skip, rate

    def forward(self, x):
        first = y = self.blocks[0](x)
        for block in self.blocks[1:]:
            y = block(y).relu()
        return y + first if self.skip else y * (1 - self.rate)


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def recipe_of(model=lambda hp: Skips(hp["skip"], hp["rate"])):
    return shoal.Recipe(model=model, data=lambda hp: ([BATCH], None), loss=loss)


def hp_of(**values):
    return HyperParameters({"skip": False, "rate": 0.5, "lr": 1e-3} | values)


def chain_for(chains, hp, recipe=None):
    recipe = recipe or recipe_of()
    model = recipe.model(hp)
    return model, chain_of(model, recipe, hp, BATCH, chains, caches_off=False)


@pytest.fixture
def built(monkeypatch):
    """The models whose chains were found by running them."""
    models = []

    def build(model, *args, **kwargs):
        models.append(model)
        return build_chain(model, *args, **kwargs)

    monkeypatch.setattr("shoal.runtime.measuring.chains.build_chain", build)
    return models


def test_one_of_its_like_is_found_once_and_has_its_own_modules(built):
    chains = Chains(recipe_of())

    first, _ = chain_for(chains, hp_of())
    second, chain = chain_for(chains, hp_of(lr=1.0))

    assert built == [first]
    assert chain.model is second
    assert all(block.module is second.blocks[i] for i, block in enumerate(chain.skeleton.blocks))


def test_its_gradients_are_those_of_the_module(built):
    chains = Chains(recipe_of())
    chain_for(chains, hp_of())
    model, chain = chain_for(chains, hp_of())

    sharded_backward(chain, BATCH, every_layer(chain))
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss(model(BATCH[0]), BATCH).backward()

    assert len(built) == 1
    assert all(map(torch.equal, found, (p.grad for p in model.parameters())))


@pytest.mark.parametrize("other", [{"skip": True}, {"rate": 0.0}])
def test_a_setting_that_may_change_its_forward_has_it_found_anew(other, built):
    chains = Chains(recipe_of())

    chain_for(chains, hp_of())
    chain_for(chains, hp_of(**other))

    assert len(built) == 2


def test_a_class_that_the_model_function_makes_may_close_over_anything(built):
    def model(hp):
        class Closes(Skips):
            def forward(self, x):
                return super().forward(x) * hp["lr"]

        return Closes()

    recipe = recipe_of(model)
    chains = Chains(recipe)

    chain_for(chains, hp_of(), recipe)
    chain_for(chains, hp_of(lr=1.0), recipe)

    assert len(built) == 2


def test_random_numbers_go_on_as_they_were():
    chains = Chains(recipe_of())
    recipe, hp = recipe_of(), hp_of()
    model = recipe.model(hp)
    torch.manual_seed(5)

    chain_of(model, recipe, hp, BATCH, chains, caches_off=False)
    drawn = torch.rand(3)

    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_nothing_of_the_first_model_is_kept():
    chains = Chains(recipe_of())
    model, chain = chain_for(chains, hp_of())
    alive = [weakref.ref(module) for module in model.modules()]
    alive += [weakref.ref(parameter) for parameter in model.parameters()]

    del model, chain
    gc.collect()

    assert [one() for one in alive if one() is not None] == []


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_a_chain_that_a_few_rows_told_is_that_of_others(rows, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "shoal.runtime.measuring.chains.build_chain",
        lambda model, recipe, batch, *more, **how: (
            seen.append(len(batch[0])) or build_chain(model, recipe, batch, *more, **how)
        ),
    )
    recipe, hp = recipe_of(), hp_of()
    model = recipe.model(hp)
    chain = chain_of(model, recipe, hp, BATCH, None, False, torch.device("cuda:0"))
    batch = torch.randn(rows, 8), torch.zeros(rows, dtype=torch.long)

    loss(model(batch[0]), batch).backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    sharded_backward(chain, batch, every_layer(chain))

    assert seen == [FEW_ROWS]
    assert all(map(torch.equal, plain, [parameter.grad for parameter in model.parameters()]))


def test_the_first_rows_of_a_batch_are_of_all_its_tensors_or_of_none():
    x, y = torch.arange(6.0).view(3, 2), torch.arange(3)

    assert [len(t) for t in first_rows((x, y), 2)] == [2, 2]
    assert first_rows({"x": x, "y": y}, 3)["x"] is x
    assert first_rows({"x": x, "y": y[:2]}, 1)["x"] is x


class Cached(Skips):
    """As Hugging Face's: a cache that a config asks for, and a setting noted in the forward."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(use_cache=True, problem_type=None)

    def forward(self, x):
        self.config.problem_type = "solved"
        return super().forward(x)


@pytest.mark.parametrize("caches_off", [False, True])
def test_a_model_that_notes_something_in_its_forward_is_known_by_what_it_was_before(
    caches_off, built
):
    recipe, hp = recipe_of(lambda hp: Cached()), hp_of()
    chains, made = Chains(recipe), []
    for _ in range(2):
        made.append(recipe.model(hp))
        chain = chain_of(made[-1], recipe, hp, BATCH, chains, caches_off)
    other = recipe.model(hp)
    chain_of(other, recipe, hp, BATCH, chains, not caches_off)

    assert built == [made[0], other]
    assert chain.model is made[1]
    assert made[1].config.use_cache is not caches_off
    assert chain.caches_off is caches_off
    chain.close()
    assert made[1].config.use_cache
