"""A block in FSDP2 sees none of its hooks, and the arguments that it was given."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shoal.runtime.gangs.group import GangGroup, NoWays, joined
from shoal.runtime.gangs.unseen import shard_unseen, show_first_layers

CPU = torch.device("cpu")


class Looks(nn.Module):
    """Says what it sees of itself and of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[object] = []
        self.fails = False

    def forward(self, x, *, also, lists):
        hooks = [*self._forward_pre_hooks.values(), *self._forward_hooks.values()]
        self.seen.append((hooks, x is also, lists[0] is x, lists[1] is x))
        if self.fails:
            raise ValueError("as asked")
        return self.layer(x) + also + lists[1]


class Around(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.enter, self.block = nn.Linear(4, 4), block

    def forward(self, x):
        x = self.enter(x)
        return self.block(x, also=x, lists=[x, x * 2])


@pytest.fixture
def mesh():
    with joined(GangGroup(0, 2, NoWays())):
        yield DeviceMesh("cpu", [0, 1])


def users_own(module, args):
    """A hook of the user's: it is there in plain training too."""


@pytest.mark.parametrize("grad", [True, False])
def test_it_sees_its_own_hooks_only_and_what_was_one_tensor_is_one(mesh, grad):
    block = Looks()
    block.register_forward_pre_hook(users_own)
    model = Around(block)
    shard_unseen(block, mesh)
    fully_shard(model, mesh=mesh)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            model(torch.randn(2, 4))
    assert block.seen == [([users_own], True, True, False)] * 2


def test_its_hooks_are_back_in_their_order_afterwards_and_after_an_error(mesh):
    block = Looks()
    block.register_forward_pre_hook(users_own)
    model = Around(block)
    shard_unseen(block, mesh)
    fully_shard(model, mesh=mesh)
    before = [*block._forward_pre_hooks], [*block._forward_hooks]
    assert len(before[0]) == 4
    model(torch.randn(2, 4)).sum().backward()
    assert ([*block._forward_pre_hooks], [*block._forward_hooks]) == before
    block.fails = True
    with pytest.raises(ValueError, match="as asked"):
        model(torch.randn(2, 4))
    assert ([*block._forward_pre_hooks], [*block._forward_hooks]) == before


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_gradients_of_an_argument_that_comes_twice_are_those_of_the_plain_block(mesh):
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(4, 2, batch_first=True)
    torch.manual_seed(0)
    block = nn.MultiheadAttention(4, 2, batch_first=True)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            parameter.fill_(0.5)  # as what comes from nobody is what was sent
            plain.get_parameter(name).fill_(0.5)
    shard_unseen(block, mesh)
    x, grads = torch.randn(2, 3, 4), []
    for attention in (plain, block):
        given = x.clone().requires_grad_()
        attention(given, given, given)[0].square().sum().backward()
        grads.append(given.grad)
    assert torch.equal(*grads)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_finds_its_first_layer_gathered_in_evaluation_only(mesh):
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder, found = nn.TransformerEncoder(layer, 2), []
    for each in encoder.layers:
        shard_unseen(each, mesh)
    fully_shard(encoder, mesh=mesh)
    show_first_layers(encoder)
    weight = encoder.layers[0].linear1
    encoder.register_forward_pre_hook(lambda *_: found.append(type(weight.weight) is nn.Parameter))
    x, padding = torch.randn(2, 3, 4), torch.tensor([[False] * 3, [False, False, True]])
    encoder(x, src_key_padding_mask=padding)
    encoder.eval()
    with torch.no_grad():
        encoder(x, src_key_padding_mask=padding)
    assert found == [False, True]
    assert type(weight.weight) is not nn.Parameter
