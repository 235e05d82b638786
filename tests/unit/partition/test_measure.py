"""What layers and shards are measured to cost."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.partition import measure
from shoal.partition.build import build_chain
from shoal.partition.drive import open_visit, sharded_backward
from shoal.partition.measure import measure_layers, measure_shards
from shoal.partition.track import AllocationTracker
from shoal.partition.units import run_backward, run_forward

CPU = torch.device("cpu")
WIDTH, BATCH = 32, 4
ROWS = BATCH * WIDTH * 4  # bytes of one activation


class Model(nn.Module):
    """An embedding that its head is tied to, and six equal blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)
        )
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def chain_and_batch(make_recipe):
    model, ids = Model(), torch.arange(BATCH)
    recipe = make_recipe(model, lambda output, ids: F.cross_entropy(output, ids))
    return build_chain(model, recipe, ids, CPU), ids


def test_a_layer_is_measured_to_the_byte(chain_and_batch):
    chain, ids = chain_and_batch

    layers = measure_layers(chain, ids, {"blocks.0.0.weight": 8192})

    assert [layer.name for layer in layers] == list(chain.layer_names)
    first, block, last = layers[0], layers[1], layers[-1]
    assert first.parameter_bytes == last.borrowed_bytes == 1536  # 1280, aligned to 512
    assert first.boundary_bytes == ROWS
    assert ROWS <= first.forward_peak_bytes < ROWS + 64  # a stand-in is one element
    assert block.parameter_bytes == WIDTH * WIDTH * 4 + 512
    assert block.state_bytes == 8192
    assert block.boundary_bytes == ROWS
    assert block.carry_bytes == ROWS + 1280  # the tied weight's part passes on its way
    assert block.forward_peak_bytes == 2 * ROWS  # before and after the tanh
    assert last.boundary_bytes == 0
    assert last.carry_bytes == ROWS + 1280  # the hidden state's gradient, the tied weight's part
    assert all(layer.backward_peak_bytes >= layer.saved_bytes for layer in layers)
    assert len({(b.saved_bytes, b.backward_peak_bytes) for b in layers[1:6]}) == 1


def test_shards_need_what_their_units_allocate(chain_and_batch):
    chain, ids = chain_and_batch
    cuts = (3, 5)

    shards = measure_shards(chain, cuts, ids, {})

    micro, wires = chain.begin(ids), {}
    for shard, (start, stop) in zip(shards, itertools.pairwise((0, *cuts)), strict=False):
        assert shard.layers == (start, stop)
        with AllocationTracker() as tracker:
            visit = open_visit(chain, start, stop, wires)
            wires = run_forward(chain, micro, start, stop, wires)
        assert tracker.peak_bytes == shard.forward_peak_bytes
        assert tracker.current_bytes == shards[shard.index + 1].boundary_bytes == ROWS
        del visit
    with AllocationTracker() as tracker:
        result = run_backward(chain, micro, 5, chain.num_layers, wires)
    assert tracker.peak_bytes == shards[2].backward_peak_bytes
    assert set(result.tied) == {"embed.weight"}
    assert [shard.owned_bytes for shard in shards] == [10752, 9216, 9216]
    assert [shard.parameter_bytes for shard in shards] == [10752, 9216, 10752]
    assert [shard.carry_bytes for shard in shards] == [0, ROWS + 1280, ROWS + 1280]


def test_measuring_leaves_gradients_buffers_and_random_state_alone(make_recipe):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 5))
    batch = torch.randn(4, 6), torch.randint(0, 5, (4,))
    chain = build_chain(model, make_recipe(model), batch, CPU)
    sharded_backward(chain, batch, ((0, 2), (2, chain.num_layers)))
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    rng = torch.get_rng_state()

    measure_layers(chain, batch, {})
    measure_shards(chain, (3,), batch, {})

    assert all(map(torch.equal, grads, (parameter.grad for parameter in model.parameters())))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(rng, torch.get_rng_state())


def test_of_layers_that_are_alike_one_is_measured(chain_and_batch):
    chain, ids = chain_and_batch
    calls = []
    chain.model.blocks[3].register_forward_hook(lambda *_: calls.append(3))
    chain.model.blocks[0].register_forward_hook(lambda *_: calls.append(0))

    measure_layers(chain, ids, {})

    assert calls.count(3) < calls.count(0)


def test_what_forwards_save_is_sent_away_of_shards_alone(chain_and_batch, monkeypatch):
    """No plan reads of a layer what could wait on the host: it is predicted without."""
    chain, ids = chain_and_batch
    tried = []
    rehearse = measure.rehearse

    def counted(chain, micro, span, *rest):
        tried.append(span)
        return rehearse(chain, micro, span, *rest)

    monkeypatch.setattr(measure, "rehearse", counted)
    measure_layers(chain, ids, {})
    assert not tried

    shards = measure_shards(chain, (3, 5), ids, {})

    assert tried == [(0, 3), (3, 5)]
    assert [shard.movable_bytes is None for shard in shards] == [False, False, True]


class Scratchy(nn.Module):
    def __init__(self, operator, scratch):
        super().__init__()
        self.linear, self.operator, self.scratch = nn.Linear(6, 6), operator, scratch

    def forward(self, x):
        return self.operator(self.linear(x), self.scratch)


def test_a_shard_has_its_kernels_scratch_memory_in_its_peaks_and_by_name(
    make_recipe, memory, operator
):
    def shards_of(scratch):
        sizes = (scratch, scratch, 2 * scratch, 2 * scratch)
        model = nn.Sequential(*(Scratchy(operator, size) for size in sizes))
        batch = torch.randn(4, 6), torch.randint(0, 5, (4,))
        chain = build_chain(model, make_recipe(model), batch, CPU)
        return measure_shards(chain, (2,), batch, {})

    without, found = shards_of(0), shards_of(8192)

    assert [shard.workspace_bytes for shard in without] == [0, 0]
    assert [shard.workspace_bytes for shard in found] == [2 * 8192, 4 * 8192]  # of backwards
    for one, other in zip(without, found, strict=True):
        assert other.saved_bytes == one.saved_bytes
        assert other.boundary_bytes == one.boundary_bytes
        grew = other.backward_peak_bytes - one.backward_peak_bytes
        assert 0 <= other.workspace_bytes - grew < 1024
