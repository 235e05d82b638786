"""Gradients of parts are put side by side: the bits of their sum, without the sum."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.fusion.graphs.graph import same_bits
from shoal.fusion.passes.sidebyside import put_side_by_side, side_by_side


def _gradient_of(code, *shape, dtype=torch.float32):
    """The graph of a gradient before and after, and how many parts were put side by side."""
    x = torch.randn(*shape, dtype=dtype)

    def gradient(x, weights):
        x = x.detach().requires_grad_()
        out = code(x)
        return torch.autograd.grad((out * weights).sum(), x)

    weights = torch.randn_like(code(x))
    weights.flatten()[::3] = 0.0
    weights.flatten()[1::5] = -0.0
    weights.flatten()[2::7] = float("nan")
    module = make_fx(gradient)(x, weights)
    before = module(x, weights)
    put_side_by_side(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    found = [node for node in module.graph.nodes if node.target is side_by_side]
    return before[0], module(x, weights)[0], [len(node.args[1]) for node in found]


def _loop(x):
    state = torch.zeros_like(x[0])
    for moment in range(len(x)):
        state = torch.tanh(state + x[moment])
    return state


def _turned(x):  # rotary embeddings
    one, two = x[..., :3], x[..., 3:]
    return torch.cat([one * 2 - two, two + one * 3], -1)


PARTS = {
    "an attention's projection": (lambda x: x[0] * x[1] + x[2], (3, 4, 5), 3),
    "of another dimension": (lambda x: x[:, 0] * x[:, -1], (4, 2, 5), 2),
    "moments": (_loop, (9, 4), 9),
    "not all of them": (lambda x: x[1] * x[3], (5, 4), 2),
    "halves": (_turned, (4, 6), None),
    "slices that leave a gap": (lambda x: x[:2] * x[4:], (6, 3), 2),
    "a slice and a number": (lambda x: x[:2] * x[2], (3, 4), 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", PARTS)
def test_the_bits_are_those_of_the_sum(name, dtype):
    code, shape, parts = PARTS[name]
    before, after, found = _gradient_of(code, *shape, dtype=dtype)
    if dtype == torch.bfloat16:  # in which torch writes NaN in two ways
        assert torch.equal(before.isnan(), after.isnan())
        before, after = before.nan_to_num(), after.nan_to_num()
    assert same_bits(before, after)
    assert before.stride() == after.stride()
    assert found if parts is None else found == [parts]


OTHERS = {
    "overlap": (lambda x: x[:3] * x[2:], (5, 4)),
    "the same part twice": (lambda x: x[1] * torch.sin(x[1]), (3, 4)),
    "steps": (lambda x: x[::2] * x[1::2], (6, 4)),
    "other dimensions": (lambda x: x[0].sum() * x[:, 0], (3, 3)),
    "all of it as well": (lambda x: x * x[0], (3, 4)),
    "one part": (lambda x: x[1], (3, 4)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_overlaps_or_is_alone_stays(name):
    code, shape = OTHERS[name]
    before, after, found = _gradient_of(code, *shape)
    assert same_bits(before, after)
    assert not found


def test_a_part_that_is_read_elsewhere_too_stays_where_it_is():
    def code(x, a, b):
        one = torch.ops.aten.select_backward(a, [2, 3], 0, 0)
        two = torch.ops.aten.select_backward(b, [2, 3], 0, 1)
        both = one + two
        return both, both + one, one

    given = torch.randn(2, 3), torch.randn(3), torch.randn(3)
    module = make_fx(code)(*given)
    before = module(*given)
    put_side_by_side(module.graph)
    module.recompile()
    assert all(map(same_bits, before, module(*given)))
