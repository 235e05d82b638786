"""Buffers and weights that no forward wrote to so far: who runs one again hears of it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch import nn

from shoal.core.errors import TrialError
from shoal.partition import dataread
from shoal.partition.build import build_chain
from shoal.partition.discover import NotCuttable
from shoal.partition.drive import every_layer, sharded_backward, sharded_evaluation
from shoal.partition.preserve import has_other
from shoal.partition.unwritten import Unwritten
from shoal.recipes.recipe import Recipe


@pytest.fixture
def block():
    made = nn.Linear(2, 2)
    made.register_buffer("cache", torch.ones(3))
    return made


def add(block):
    block.cache += 1


def make_anew(block):
    block.cache = block.cache + 1


def add_into_data(block):
    block.cache.data.add_(1)


def add_by_numpy(block):
    array = block.cache.numpy()
    array += 1


@pytest.mark.parametrize("write", [add, make_anew, add_into_data, add_by_numpy])
def test_what_would_be_written_twice_is_named(write, block):
    watch = Unwritten({"one": block}, ())
    with pytest.raises(TrialError, match=r"wrote to the buffer 'one\.cache'"), watch.required():
        write(block)


def lengthen(block):
    block.cache = torch.ones(5)


def make_the_same(block):
    block.cache = torch.ones(3)


def read(block):
    block.cache.sum()


def read_by_numpy(block):
    block.cache.numpy().sum()


@pytest.mark.parametrize("do", [lengthen, make_the_same, read, read_by_numpy])
def test_what_comes_to_the_same_twice_may_be_done(do, block):
    with Unwritten({"one": block}, ()).required():
        do(block)


def test_of_what_is_known_to_change_there_are_copies(block):
    with Unwritten({"one": block}, [block.cache]).required():
        add(block)


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm

    def forward(self, x):
        return self.norm(self.linear(x))


def test_a_norm_that_blocks_share_is_known_to_change_in_each_of_them():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(Block(norm), Block(norm), nn.Linear(4, 2))
    recipe = Recipe(model=lambda hp: model, data=lambda hp: None, loss=lambda y, batch: y.sum())
    batch = (torch.randn(3, 4),)
    chain = build_chain(model, recipe, batch, torch.device("cpu"))
    with chain.unwritten(2, 3).required():
        model[1](*batch)


# -- weights -----------------------------------------------------------------------------------


class Clamping(nn.Module):
    """From some moment on its forward keeps its weights small."""

    def __init__(self):
        super().__init__()
        self.linear, self.clamp = nn.Linear(4, 4), None

    def forward(self, x):
        if self.clamp is not None:
            self.clamp(self.linear)
        return self.linear(x)


def by_data(linear, limit=0.1):
    linear.weight.data = linear.weight.data.clamp(-limit, limit)


def in_place(linear):
    with torch.no_grad():
        linear.weight.clamp_(-0.1, 0.1)


def into_data(linear):
    linear.weight.data.clamp_(-0.1, 0.1)


def into_a_view_of_data(linear):
    linear.weight.view(-1).data[::2].zero_()


def by_numpy(linear):
    array = np.asarray(linear.weight.detach())
    np.clip(array, -0.1, 0.1, out=array)


def by_dlpack(linear):
    torch.from_dlpack(linear.weight.detach()).clamp_(-0.1, 0.1)


def at_an_address(linear):
    ctypes.cast(linear.weight.data_ptr(), ctypes.POINTER(ctypes.c_float))[5] = 0.1


def by_a_hook(linear):
    linear.weight.register_hook(lambda grad: grad / 2)


def by_a_hook_after(linear):
    linear.weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.div_(2))


WITHOUT_TORCH = (by_numpy, by_dlpack, at_an_address)


def by_another(linear):
    linear.weight = nn.Parameter(linear.weight.detach().clamp(-0.1, 0.1))


def chain_of(*blocks):
    model = nn.Sequential(nn.Linear(4, 4), *blocks, nn.Linear(4, 2))
    recipe = Recipe(model=lambda hp: model, data=lambda hp: None, loss=lambda y, batch: y.sum())
    return build_chain(model, recipe, (torch.randn(3, 4),), torch.device("cpu"))


@pytest.mark.parametrize(
    "clamp",
    [
        *(by_data, in_place, into_data, into_a_view_of_data, by_another),
        *(*WITHOUT_TORCH, by_a_hook, by_a_hook_after),
    ],
)
@pytest.mark.parametrize("run", [sharded_backward, sharded_evaluation])
def test_a_block_that_comes_to_write_to_its_weights_is_named(run, clamp):
    chain, batch = chain_of(Clamping(), Clamping()), (torch.randn(3, 4),)
    run(chain, batch, every_layer(chain))
    chain.model[2].clamp = clamp
    with pytest.raises(TrialError, match=r"wrote to the weight '2\.linear\.weight'.* optimizer's"):
        run(chain, batch, every_layer(chain))


def test_one_that_writes_to_a_weight_that_is_away_is_told_so():
    chain, batch = chain_of(Clamping(), Clamping()), (torch.randn(3, 4),)
    chain.model[2].clamp = lambda linear: in_place(chain.model[1].linear)
    chain.model[1].linear.weight.data = torch.zeros(1).expand(4, 4)
    with pytest.raises(RuntimeError, match="single memory location") as caught:
        sharded_backward(chain, batch, every_layer(chain))
    assert "technique='resident'" in caught.value.__notes__[0]


@pytest.mark.parametrize("clamp", [by_data, in_place, into_data, by_numpy])
@pytest.mark.parametrize("block", [1, 3])
def test_so_is_one_whose_hook_in_the_backward_does(block, clamp):
    chain, batch = chain_of(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(3, 4),)
    linear = chain.model[block]
    linear.weight.register_hook(lambda grad: clamp(linear))
    with pytest.raises(
        TrialError, match=rf"in the backward wrote to the weight '{block}\.weight'"
    ):
        sharded_backward(chain, batch, every_layer(chain))


@pytest.mark.parametrize("write", [by_data, in_place, into_data])
def test_a_model_that_writes_to_weights_where_its_mode_changes_is_not_cut(write):
    class Merging(nn.Linear):
        def train(self, mode=True):
            if mode is not self.training:
                write(self)
            return super().train(mode)

    with pytest.raises(
        NotCuttable, match=r"train\(\) or eval\(\) writes to the weight '1\.weight'"
    ):
        chain_of(Merging(4, 4), nn.Linear(4, 4))


def test_one_that_keeps_norms_in_evaluation_is():
    class Frozen(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(False)

    assert chain_of(nn.Sequential(nn.Linear(4, 4), Frozen(4)), nn.Linear(4, 4)).num_layers == 7


def test_data_is_read_and_given_to_others_as_ever():
    def reads(linear):
        other = linear.weight.data.clone().clamp_(-0.1, 0.1)
        other.data.mul_(2)

    chain, batch = chain_of(Clamping(), Clamping()), (torch.randn(3, 4),)
    chain.model[2].clamp = reads
    sharded_backward(chain, batch, every_layer(chain))
    assert torch.Tensor.data.__get__(torch.ones(1)) == 1  # to who asks the class it is torch's


def test_memory_is_read_as_ever():
    def reads(linear):
        assert linear.weight.detach().numpy().sum() == np.asarray(linear.weight.detach()).sum()
        assert linear.weight.data_ptr() == torch.Tensor.data_ptr(linear.weight)

    chain, batch = chain_of(Clamping(), Clamping()), (torch.randn(3, 4),)
    chain.model[2].clamp = reads
    sharded_backward(chain, batch, every_layer(chain))


def test_to_compare_where_a_weight_lies_hands_no_memory_out():
    weight = torch.ones(3)
    with dataread.DataReads([weight]) as reads:
        assert not has_other(weight, dataread.plain_data(weight))
    assert not reads


def test_buffers_in_the_memory_of_weights_may_be_written_to():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4))
            memory = torch.randn(20)
            self.linear.weight.data, self.seen.data = memory[:16].view(4, 4), memory[16:]

        def forward(self, x):
            self.seen.data += x.detach().mean(0)
            return self.linear(x)

    chain, batch = chain_of(Counting(), Counting()), (torch.randn(3, 4),)
    sharded_backward(chain, batch, every_layer(chain))


def test_one_whose_weights_have_the_same_values_elsewhere_goes_on():
    chain, batch = chain_of(Clamping(), Clamping()), (torch.randn(3, 4),)
    chain.model[2].clamp = lambda linear: by_data(linear, 10.0)
    sharded_backward(chain, batch, every_layer(chain))


def test_max_norm_may_write_as_it_did():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(3, 4, max_norm=0.5)

        def forward(self, x):
            return x + self.words(torch.arange(3))

    chain, batch = chain_of(Words(), Words()), (torch.randn(3, 4),)
    for _ in range(2):
        sharded_backward(chain, batch, every_layer(chain))
