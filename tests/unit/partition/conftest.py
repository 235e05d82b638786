"""Plain training beside a chain, bit for bit."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.nn import functional as F

from shoal.partition.build import build_chain
from shoal.partition.drive import every_layer, sharded_backward
from shoal.recipes.recipe import Recipe, autocast, compute_loss, model_inputs
from shoal.rng import capture_rng, same_rng, seed_all

CPU = torch.device("cpu")


def cross_entropy(output, batch):
    return F.cross_entropy(output, batch[1])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    seed_all(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_recipe():
    """A function that gives the recipe of a model that is already built."""

    def make(model, loss=cross_entropy, **options):
        return Recipe(model=lambda hp: model, data=lambda hp: ([], None), loss=loss, **options)

    return make


@pytest.fixture
def assert_bitwise(make_recipe):
    """A function that trains a model plainly and in shards and compares every bit.

    Two SGD steps over ``batches``, for the finest cut and for every cut into two shards.
    """

    def train(model, recipe, batches, backward):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        seed_all(1)
        losses = []
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            losses += [backward(model, recipe, batch, len(batches)) for batch in batches]
            optimizer.step()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return losses, {**model.state_dict(), "grads": grads}, capture_rng()

    def plain(model, recipe, batch, accumulate):
        with autocast(recipe, CPU):
            args, kwargs = model_inputs(recipe, batch)
            loss = compute_loss(recipe, model(*args, **kwargs), batch)
        (loss / accumulate).backward()
        return loss.detach()

    def check(model, batches, loss=cross_entropy, **options):
        alone = copy.deepcopy(model)
        expected = train(alone, make_recipe(alone, loss, **options), batches, plain)
        chain = build_chain(model, make_recipe(model, loss, **options), batches[0], CPU)
        start = copy.deepcopy(model.state_dict())
        cuts = [every_layer(chain)]
        cuts += [((0, at), (at, chain.num_layers)) for at in range(1, chain.num_layers)]
        for ranges in cuts:
            model.load_state_dict(start)

            def sharded(model, recipe, batch, accumulate, ranges=ranges):
                return sharded_backward(chain, batch, ranges, accumulate=accumulate)

            found = train(model, None, batches, sharded)
            assert_same_run(expected, found)
        return chain

    return check


def assert_same_run(expected, found):
    for first, second in zip(expected[0], found[0], strict=True):
        assert torch.equal(first, second)
    assert expected[1].keys() == found[1].keys()
    assert expected[1]["grads"].keys() == found[1]["grads"].keys()
    flat = [{**state, **state["grads"]} for state in (expected[1], found[1])]
    for state in flat:
        del state["grads"]
    different = [name for name in flat[0] if not torch.equal(flat[0][name], flat[1][name])]
    assert not different
    assert same_rng(expected[2], found[2])


@pytest.fixture
def tokens():
    """A function that draws token ids."""
    seeds = itertools.count(100)

    def draw(*shape, vocabulary=40):
        generator = torch.Generator().manual_seed(next(seeds))
        return torch.randint(vocabulary, shape, generator=generator)

    return draw
