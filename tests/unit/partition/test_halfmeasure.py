"""What the halves of a backward are measured to leave and take."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.device.flops import count_flops
from shoal.partition.build import build_chain
from shoal.partition.measure import measure_layers, measure_shards
from shoal.planner.stages import predicted

CPU = torch.device("cpu")
WIDTH, BATCH = 32, 4
ROWS = BATCH * WIDTH * 4  # bytes of one activation
WEIGHTS = WIDTH * WIDTH * 4 + WIDTH * 4  # with the bias
LEAF = 4  # which a graph begins with, at its boundary


class Model(nn.Module):
    """Six blocks; ``tied``: the head's weights are the embedding's."""

    def __init__(self, block, *, tied=False):
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def dense():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def turned():
    return nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def dropped():
    return nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))


@pytest.fixture
def chain_of(make_recipe):
    def make(block, **model):
        ids = torch.arange(BATCH)
        module = Model(block, **model)
        recipe = make_recipe(module, lambda output, ids: F.cross_entropy(output, ids))
        return build_chain(module, recipe, ids, CPU), ids

    return make


def once(work):
    work()
    return 1.0


def halves_of(chain, ids, cuts):
    shards = measure_shards(chain, cuts, ids, {}, timed=once, halves=True)
    return [shard.halves for shard in shards]


def test_a_block_leaves_what_its_weights_read(chain_of):
    """Of Linear, Tanh: its input, which came, and the gradient between the two."""
    first, one, two, rest = halves_of(*chain_of(dense), (2, 3, 5))
    assert first is None  # nobody waits for the first layers
    assert (one.left_bytes, one.keeps_boundary, one.keeps_carry) == (ROWS + LEAF, True, False)
    assert two.left_bytes == 3 * ROWS + LEAF  # also what the first block hands to the second
    assert rest.keeps_boundary


def test_a_message_whose_tensors_are_read_is_kept(chain_of):
    """Of Tanh, Linear: the gradient that came, and what was made between the two."""
    _, one, _ = halves_of(*chain_of(turned), (2, 3))
    assert (one.left_bytes, one.keeps_boundary, one.keeps_carry) == (ROWS + LEAF, False, True)


def test_the_second_half_needs_a_gradient_beside_the_one_there_is(chain_of):
    _, one, _ = halves_of(*chain_of(dense), (2, 3))
    assert one.second_peak_bytes == WEIGHTS
    assert one.first_peak_bytes == 3 * ROWS + LEAF


def test_a_backward_that_cannot_be_cut_leaves_nothing(chain_of):
    """The head's gradient has to travel to the embedding."""
    *_, last = halves_of(*chain_of(dense, tied=True), (3,))
    assert (last.left_bytes, last.keeps_boundary, last.keeps_carry) == (0, False, False)
    assert last.first_peak_bytes >= WEIGHTS
    assert last.second_peak_bytes == 0


def test_buffers_gradients_and_random_state_are_left_alone(chain_of):
    chain, ids = chain_of(dropped)
    before = {name: buffer.clone() for name, buffer in chain.model.named_buffers()}
    rng = torch.get_rng_state()
    measure_layers(chain, ids, {}, halves=True)
    measure_shards(chain, (3,), ids, {}, halves=True)
    assert all(torch.equal(buffer, before[n]) for n, buffer in chain.model.named_buffers())
    assert torch.equal(rng, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in chain.model.parameters())


def test_halves_are_measured_where_they_are_asked_for(chain_of):
    chain, ids = chain_of(dense)
    assert all(layer.halves is None for layer in measure_layers(chain, ids, {}))
    assert all(shard.halves is None for shard in measure_shards(chain, (3,), ids, {}))


@pytest.mark.parametrize("block", [dense, turned, dropped])
def test_layers_foretell_what_a_stage_of_them_leaves(block, chain_of):
    chain, ids = chain_of(block)
    layers = measure_layers(chain, ids, {}, halves=True)
    for cuts in [(2, 4), (3, 5), (1, 6)]:
        measured = halves_of(chain, ids, cuts)
        for found, shard in zip(measured[1:], predicted(layers, cuts)[1:], strict=True):
            guess = shard.halves
            assert found.left_bytes <= guess.left_bytes <= 1.5 * found.left_bytes + ROWS
            assert found.keeps_boundary == guess.keeps_boundary
            assert found.keeps_carry == guess.keeps_carry
            assert found.first_peak_bytes <= guess.first_peak_bytes
            assert found.second_peak_bytes <= guess.second_peak_bytes


def test_each_half_takes_its_own_products(chain_of):
    """Products for seconds: the forward's and that for inputs first, later that for weights."""
    chain, ids = chain_of(dense)
    product = 2 * BATCH * WIDTH * WIDTH
    shards = measure_shards(chain, (2, 3), ids, {}, timed=count_flops, halves=True)
    halves = shards[1].halves
    assert (halves.first_s, halves.second_s) == (2 * product, product)
