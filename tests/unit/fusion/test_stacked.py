"""Stacking copies no bit wrong, keeps the parameter objects, and is undone without a trace."""

import copy

import pytest
import torch
from torch import nn

from shoal.fusion.rows.stacked import Stacked
from shoal.testing import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


class Odd(nn.Module):
    """Tied weights, a scalar and an integer buffer, one shared under two names, channels last."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.register_buffer("scalar", torch.randn(()))
        self.register_buffer("again", self.scalar)
        self.register_buffer("nothing", None)
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)


@pytest.fixture
def modules():
    torch.manual_seed(0)
    return [Odd() for _ in range(3)]


def test_stacked_and_let_go_is_bitwise_the_same(modules):
    before = [copy.deepcopy(m.state_dict()) for m in modules]
    strides = [t.stride() for t in modules[0].state_dict().values()]
    parameters = [list(m.parameters()) for m in modules]

    stacked = Stacked(modules)
    assert [t.stride() for t in modules[1].state_dict().values()] == strides
    for module in modules:
        stacked.let_go(module)

    for module, state, own in zip(modules, before, parameters, strict=True):
        assert all(same_bits(module.state_dict()[name], t) for name, t in state.items())
        assert [t.stride() for t in module.state_dict().values()] == strides
        assert all(p is q for p, q in zip(module.parameters(), own, strict=True))
        assert module.two.weight is module.one.weight
        assert module.again is module.scalar


def test_a_module_lives_in_its_row(modules):
    stacked = Stacked(modules)

    with torch.no_grad():
        modules[1].one.weight.fill_(7.0)
        modules[2].norm.running_mean.fill_(8.0)
        stacked.parameters["frozen"][0] = 9.0

    assert stacked.parameters["one.weight"][1].unique().tolist() == [7.0]
    assert stacked.buffers["norm.running_mean"][2].unique().tolist() == [8.0]
    assert modules[0].frozen.tolist() == [9.0, 9.0]
    assert [k for k, p in stacked.parameters.items() if not p.requires_grad] == ["frozen"]


def test_what_was_let_go_shares_no_memory(modules):
    stacked = Stacked(modules)
    stacked.let_go(modules[0])

    stacked.parameters["one.weight"].detach().zero_()

    assert modules[0].one.weight.any()
    assert not modules[1].one.weight.any()


def test_what_is_dropped_holds_no_memory_and_its_row_stays(modules):
    stacked, before = Stacked(modules), modules[1].one.weight.detach().clone()

    stacked.drop(modules[1])

    held = [*modules[1].parameters(), *modules[1].buffers()]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
    assert same_bits(stacked.parameters["one.weight"][1], before)
