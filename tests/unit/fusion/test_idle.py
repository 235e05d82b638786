"""A slot that takes no part in a micro-batch keeps its gradients, whatever its neighbours see."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.fusion import Array, Member, backend_of
from shoal.fusion.graphs.compiled import compiler
from shoal.fusion.passes.idle import add_gradients, nothing_for_idle
from shoal.partition.track import AllocationTracker
from shoal.recipes.recipe import Recipe
from shoal.rng import capture_rng


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


class Rooted(nn.Linear):
    """Its output at 0 is 0, and its gradient there is none."""

    def forward(self, x):
        return super().forward(x).abs().sqrt()


def members():
    torch.manual_seed(3)
    recipe = Recipe(model=lambda hp: None, data=lambda hp: ([], None), loss=loss, accumulate=2)
    made = []
    for _ in range(2):
        layers = [Rooted(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3)]
        net = nn.Sequential(*layers).double()
        steps = torch.optim.SGD(net.parameters(), lr=0.1)
        values = {"module": net, "optimizer": steps, "schedule": None, "rng": capture_rng()}
        made.append(Member(recipe=recipe, hp={}, **values))
    return made


def batch(fill=None):
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)
    return (x if fill is None else torch.full_like(x, fill)), torch.tensor([0, 1, 2, 0, 1])


def stepped(kind, order, fill):
    """The weights of slot 1, whose neighbour has a batch of ``fill`` where it has none."""
    array = Array(members(), backend=backend_of(kind))
    rows = [[batch(), batch()], [batch(fill), None]]
    for _ in range(3):
        failures = array.step(*(rows if order == "later" else rows[::-1])).failures
        assert 1 not in failures
    return array.extract(1)["model"]


@pytest.mark.parametrize("kind", ["eager", "traced"])
@pytest.mark.parametrize("order", ["later", "earlier"])
@pytest.mark.parametrize("fill", [torch.nan, 0.0], ids=["its loss", "its gradient"])
def test_what_a_neighbour_has_then_is_nothing_to_it(kind, order, fill):
    usual, spoilt = stepped(kind, order, 0.5), stepped(kind, order, fill)
    assert all(torch.isfinite(value).all() for value in spoilt.values())
    assert all(torch.equal(usual[name], spoilt[name]) for name in usual)


@pytest.mark.skipif(not compiler(), reason="there is no C++ compiler")
@pytest.mark.full
def test_nor_where_steps_are_compiled():
    usual, spoilt = (stepped("compiled", "later", fill) for fill in (0.5, 0.0))
    assert all(torch.equal(usual[name], spoilt[name]) for name in usual)


# -- what is added to a gradient that waits -------------------------------------------------


def block(width=3):
    found = torch.ones(width, 2, requires_grad=True)
    found.grad = torch.tensor([[0.0, -0.0]] * width)
    return found


def signs(tensor):
    return tensor.signbit().tolist()


@pytest.mark.parametrize("width", [3, 4])
def test_a_gradient_that_waits_keeps_its_bits_the_sign_of_zero_too(width):
    held = block(width)
    with nothing_for_idle([held], [True] + [False] * (width - 1), adds=True):
        (held.sqrt() * 0.0).sum().backward()
    assert signs(held.grad) == [[False, False]] + [[False, True]] * (width - 1)


@pytest.mark.parametrize("fill", [1.0, torch.inf])
def test_in_memory_that_rows_share_it_is_written_once_and_nowhere_else(fill):
    """The gradient of a sum is one number, as often as there are elements."""
    one, other = block(), block()
    weights = torch.tensor([2.0, fill, 3.0])
    with nothing_for_idle([one, other], [True, False, True], adds=True):
        ((one + other).sum(1) * weights).sum().backward()
    for held in (one, other):
        assert held.grad.tolist() == [[2.0, 2.0], [0.0, 0.0], [3.0, 3.0]]
        assert signs(held.grad)[1] == [False, True]


def test_one_row_that_all_slots_share_stays_the_others_own():
    held = block()
    with nothing_for_idle([held], [True, False, False], adds=True):
        held.sum().backward()
    assert held.grad.tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


def test_what_comes_first_leaves_nothing_that_a_later_batch_is_added_to():
    fresh = block()
    fresh.grad = None
    with nothing_for_idle([fresh], [False, True, False], adds=True):
        fresh.square().sum().backward()
    graph = block()
    graph.grad = None
    add_gradients(
        {"w": graph}, {"w": torch.full((3, 2), torch.inf)}, [False, True, False], adds=True
    )
    for held in (fresh, graph):
        assert signs(held.grad) == [[True, True], [False, False], [True, True]]
        assert held.grad[0].tolist() == [0.0, 0.0]


def test_no_memory_is_taken_for_it():
    held, size = torch.ones(4, 1000, requires_grad=True), 4 * 4000
    for active in ([True] * 4, [True, False, True, False]):
        held.grad = torch.zeros(4, 1000)
        with AllocationTracker() as tracker, nothing_for_idle([held], active, adds=True):
            held.square().sum().backward()
        peak = tracker.peak_bytes
        if all(active):
            usual = peak
    assert peak == usual >= size
