"""What torch computes otherwise under a mode: bits are those without one."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.partition.askers import PLACES
from shoal.partition.track import AllocationTracker
from shoal.testing import assert_same, plain_loop, same_bits

MASK = torch.arange(768).view(8, 4, 3, 8) % 3 > 0


def written_through_a_view(x):
    y = x.sin()
    y.view(-1, 8).cumprod_(1)
    return y.exp()


ASKING = {
    "prod": lambda x: x.prod(-2).sin(),
    "prod of all": lambda x: x[0, 0].prod().sin(),
    "cumprod": lambda x: x.cumprod(-1).sin(),
    "cumprod of a view": written_through_a_view,
    "masked_fill": lambda x: torch.zeros(8, 4, 3, 8).masked_fill(MASK, x.sum() / 768).sin(),
    "median": lambda x: -x.median().sin(),
    "nanmedian": lambda x: -x.nanmedian().sin(),
    "max": lambda x: -x.max().sin(),
    "det": lambda x: (x[..., :3] + torch.eye(3)).det().sin(),
}


def gradient(function, mode, twice):
    torch.manual_seed(0)
    x = (torch.rand(8, 4, 3, 8) + 0.1).requires_grad_()
    with mode:
        y = function(x)
        (found,) = torch.autograd.grad(y, x, torch.randn_like(y), create_graph=twice)
        if twice:
            (found,) = torch.autograd.grad(found.square().sum(), x)
    return found


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", ASKING)
def test_a_gradient_that_is_counted_has_the_bits_of_one_that_is_not(name, twice):
    tracker = AllocationTracker()
    counted = gradient(ASKING[name], tracker, twice)
    assert same_bits(counted, gradient(ASKING[name], nullcontext(), twice))
    left = counted.untyped_storage().nbytes()
    assert tracker.current_bytes == left  # and nothing else is still counted
    assert tracker.peak_bytes > left


FORWARDS = {
    "one matrix for all": lambda x: x[0] @ x[1, :1].mT,
    "one for all others": lambda x: torch.matmul(x[1, :1].mT, other=x[0]),
    "by a method": lambda x: x[1, :1].mT.matmul(x[0]),
    "singular values": lambda x: torch.linalg.svdvals(x.mT),
    "singular values without vectors": lambda x: torch.svd(x, compute_uv=False)[1],
    "those by a method": lambda x: x.svd(True, False)[1],
    "nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "nuclear norm by its own name": lambda x: torch.nuclear_norm(x, (-2, -1)),
    "nuclear norm among others": lambda x: torch.norm(x, "nuc", dim=(-2, -1)),
    "nuclear norm by a method": lambda x: x[0, 0].norm("nuc"),
    "condition": lambda x: torch.linalg.cond(x, None),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x.mT @ x),
}


@pytest.mark.filterwarnings("ignore:at..nuclear_norm is deprecated")
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("name", FORWARDS)
def test_an_operation_that_is_counted_has_the_bits_of_one_that_is_not(name, is_trained):
    torch.manual_seed(0)
    x = torch.rand(8, 4, 3, 8)
    plain = FORWARDS[name](x.clone().requires_grad_(is_trained))
    begun = x.clone().requires_grad_(is_trained)
    with AllocationTracker(as_alone=True) as tracker:
        counted = FORWARDS[name](begun)
    assert same_bits(counted.detach(), plain.detach())
    assert tracker.current_bytes >= counted.nbytes


def test_who_calls_them_otherwise_computes_what_he_computes_alone():
    """By names of arguments, within a transform of functions, and in another thread."""
    x, y = torch.rand(4, 3, 3), torch.rand(1, 3, 3)
    found = []
    with AllocationTracker(as_alone=True):
        product = torch.matmul(input=x, other=y)
        norms = torch.func.vmap(torch.linalg.norm)(x)
        products = torch.func.vmap(lambda one: one.expand(2, 3, 3) @ y)(x)
        other = threading.Thread(target=lambda: found.append(torch.linalg.norm(x)))
        other.start()
        other.join()
    assert same_bits(product, x @ y)
    assert same_bits(norms, torch.func.vmap(lambda one: torch.linalg.norm(one))(x))
    assert products.shape == (4, 2, 3, 3)
    assert same_bits(found[0], torch.linalg.norm(x))


def test_the_mode_is_on_again_where_an_operation_fails():
    before = [vars(owner).get(name) for owner, name in PLACES]
    with pytest.raises(RuntimeError), AllocationTracker(as_alone=True):
        torch.rand(1, 3, 3) @ torch.rand(2, 2, 3)
    with AllocationTracker(as_alone=True) as tracker:
        kept = torch.rand(2, 3, 3) @ torch.rand(1, 3, 3)
    assert tracker.current_bytes == kept.nbytes
    assert [vars(owner).get(name) for owner, name in PLACES] == before


def test_what_torch_has_a_kernel_for_in_evaluation_takes_it_where_it_is_counted():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.rand(2, 3, 8)
    with torch.no_grad():
        plain = layer(x)
        with AllocationTracker(as_alone=True):
            counted = layer(x)
    assert same_bits(counted, plain)


def test_the_mode_is_on_again_where_a_derivative_fails():
    def fails_on_its_way_back():
        x = torch.rand(3, requires_grad=True)
        y = x.prod()
        (x + 1).sum()  # now the node is there
        y.grad_fn.register_prehook(lambda given: 1 / 0)
        y.backward()

    x = torch.rand(3)
    with pytest.raises(ZeroDivisionError), AllocationTracker():
        fails_on_its_way_back()
    with AllocationTracker() as tracker:
        kept = x + 1
    assert tracker.current_bytes == kept.nbytes


class Odds(nn.Module):
    """How likely all of some are, and a learned value where there is none."""

    def __init__(self):
        super().__init__()
        self.layer, self.filler = nn.Linear(6, 24), nn.Parameter(torch.tensor(0.3))
        self.register_buffer("turn", torch.randn(1, 3, 3))

    def forward(self, x):
        turned = x.view(-1, 2, 3) @ self.turn  # one matrix for all
        odds = self.layer(turned.flatten(1)).sigmoid().view(-1, 4, 6)
        return odds.masked_fill(x[:, None] > 1, self.filler).prod(2)


def data(hp):
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x[:, :4].sigmoid()), batch_size=16, shuffle=True), None


def squares(output, batch):
    return (output - batch[1]).square().mean()


def test_a_trial_of_such_a_model_ends_on_the_plain_bits(run_study):
    recipe = shoal.Recipe(model=lambda hp: Odds(), data=data, loss=squares)
    report = run_study(recipe, shoal.grid(lr=[1e-2]), epochs=2, metric="train_loss")
    for trial in report.trials:
        assert_same(plain_loop(recipe, trial.hp, trial.seed, epochs=2), trial)
