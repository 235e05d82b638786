"""Forwards that give weights other values by ``.data``, or put others in their place."""

from __future__ import annotations

import pytest
import torch
from companies import member_of
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.fusion import Array, Declined, LoopBackend
from shoal.fusion.graphs.branches import BranchesBackend
from shoal.fusion.passes.fused import StackedBackend
from shoal.fusion.passes.loop import error_alone
from shoal.recipes.recipe import Recipe
from shoal.testing import plain_loop

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3  # that nothing happens in
LIMIT = 0.1


class Clamping(nn.Module):
    """Counts in a buffer, which an array may, and after some steps keeps its weights small."""

    def __init__(self, clamp, *, disagrees: bool, after: int = STEPS) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.clamp, self.disagrees, self.after = clamp, disagrees, after

    def forward(self, x):
        self.count += 1
        if self.count.item() > self.after:
            self.clamp(self.layer)
        if self.disagrees and x.sum() > 0:  # and so its part runs slot by slot
            x = x + 0.0
        return self.layer(x).tanh()


def by_data(layer):
    layer.weight.data = layer.weight.data.clamp(-LIMIT, LIMIT)


def by_another(layer):
    layer.weight = nn.Parameter(layer.weight.detach().clamp(-LIMIT, LIMIT))


def by_numpy(layer):
    array = layer.weight.detach().numpy()
    array *= 0.5


def by_a_hook(layer):
    layer.weight.register_hook(lambda grad: grad / 2)


def model(hp):
    clamping = Clamping(hp["clamp"], disagrees=hp["disagrees"])
    return nn.Sequential(clamping, nn.Linear(8, 2, dtype=torch.float64))


def data(hp):
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(zip(x.split(2), (x.sum(1) > 0).long().split(2), strict=True)), None


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sgd(named, hp):
    return torch.optim.SGD([p for _, p in named], lr=0.1)


RECIPE = Recipe(model=model, data=data, loss=loss, optimizer=sgd)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def array_of(backend, hp):
    return Array([member_of(RECIPE, hp, seed) for seed in range(3)], backend=backend())


@pytest.mark.parametrize("disagrees", [False, True])
@pytest.mark.parametrize("clamp", [by_data, by_another])
def test_an_array_is_declined_at_that_step_as_its_rows_do_not_follow(clamp, disagrees):
    hp = {"clamp": clamp, "disagrees": disagrees}
    array, batches = array_of(StackedBackend, hp), data(hp)[0]
    for step in range(STEPS):
        assert not array.step([batches[step], batches[step + 1], batches[step + 2]]).failures
    with pytest.raises(Declined, match=r"gave a weight other values by \.data, or put another"):
        array.step(batches[:3])


def test_branches_are_declined_too():
    hp = {"clamp": by_data, "disagrees": False}
    array, batches = array_of(BranchesBackend, hp), data(hp)[0]
    for step in range(STEPS):
        array.step([batches[step]] * 3)
    with pytest.raises(Declined, match=r"gave a weight other values by \.data"):
        array.step(batches[:3])


def test_slot_by_slot_rows_have_what_data_gave():
    hp = {"clamp": by_data, "disagrees": False}
    array, batches = array_of(LoopBackend, hp), data(hp)[0]
    for batch in batches:
        assert not array.step([batch] * 3).failures
    for seed in range(3):
        alone = plain_loop(RECIPE, hp, seed, epochs=1)
        assert same(alone.state()["model"], array.extract(seed)["model"])


@pytest.mark.parametrize("backend", [StackedBackend, LoopBackend])
def test_an_array_whose_evaluation_puts_another_in_its_place_is_declined(backend):
    hp = {"clamp": by_another, "disagrees": False}
    array, batches = array_of(backend, hp), data(hp)[0]
    for step in range(STEPS):
        array.step([batches[step]] * 3)
    with array.evaluating(), pytest.raises(Declined, match="put another one in its place"):
        array.evaluate_by_itself(1, batches[0])


def clamping_late(hp):
    """After more forwards than there are before it trains."""
    clamp = by_another if hp["another"] else by_data
    return nn.Sequential(
        Clamping(clamp, disagrees=False, after=20), nn.Linear(8, 2, dtype=torch.float64)
    )


@pytest.mark.parametrize("options", [{"fuse": 2}, {}], ids=str)
def test_a_study_says_that_another_is_in_its_place(options, run_study):
    """Alone the optimizer goes on with the first one, and a checkpoint would have that."""
    recipe = Recipe(model=clamping_late, data=data, loss=loss, optimizer=sgd)
    space = shoal.grid(another=[True, False], seed=[0, 1])
    report = run_study(recipe, space, steps=24, **options)
    words = "the forward gave the model another '0.layer.weight', and a trial's parameters are"
    for trial in report.trials:
        assert words in trial.error if trial.hp["another"] else not trial.error


@pytest.mark.parametrize("clamp", [by_data, by_another])
def test_looking_for_who_raises_changes_no_weight(clamp):
    """The one without a class raises, and each of them is tried alone."""
    hp = {"clamp": clamp, "disagrees": False}
    array, batches = array_of(StackedBackend, hp), data(hp)[0]
    for step in range(STEPS):
        array.step([batches[step]] * 3)
    before = [array.extract(slot)["model"] for slot in range(3)]
    with pytest.raises(Declined):
        array.step([batches[0], (batches[0][0], batches[0][1] + 9), batches[0]])
    assert all(same(one, array.extract(n)["model"]) for n, one in enumerate(before))


def test_who_looks_for_what_raises_leaves_no_values_that_numpy_wrote():
    array, batches = array_of(LoopBackend, {"clamp": by_numpy, "disagrees": False}), data({})[0]
    for batch in batches:  # until it writes
        array.step([batch] * 3)
    before = array.extract(1)["model"]
    assert error_alone(array._crew, 1, batches[0]) is None
    assert same(before, array.extract(1)["model"])


def test_an_array_whose_forward_comes_to_put_a_hook_on_a_weight_is_declined():
    hp = {"clamp": by_a_hook, "disagrees": False}
    array, batches = array_of(StackedBackend, hp), data(hp)[0]
    for step in range(STEPS):
        array.step([batches[step]] * 3)
    before = [array.extract(slot)["model"] for slot in range(3)]
    with pytest.raises(Declined, match=r"puts a hook on a tensor \(register_hook\)"):
        array.step([batches[0]] * 3)
    assert all(same(one, array.extract(n)["model"]) for n, one in enumerate(before))
