"""What a forward leaves in Python, where it matters to those that follow, and where not."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch import nn

import shoal
from shoal.core.spec import TrialSpec
from shoal.fusion.effects.sideeffects import attributes_of, in_words
from shoal.runtime.measuring.settling import changed_attributes, why_changes_matter

BATCH = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 6))


class Net(nn.Module):
    def __init__(self, does):
        super().__init__()
        self.layer, self.does = nn.Linear(6, 6), does
        self.begun, self.count, self.rate, self.kept = False, 0, 0.5, None

    def forward(self, x):
        return self.does(self, self.layer(x))


def begins(net, x):
    """Its first batch tells it how to scale."""
    if not net.begun:
        net.begun, net.kept = True, x.detach().std()
    return x / net.kept


def opens(net, x):
    """A part that waits for three batches."""
    net.count = min(net.count + 1, 3)
    return x.tanh() if net.count >= 3 else x


def anneals(net, x):
    net.rate = max(0.1, net.rate * 0.9)
    return nn.functional.dropout(x, net.rate, net.training)


def draws_a_table(net, x):
    if net.kept is None:
        net.kept = torch.randn(6)
    return nn.functional.dropout(x + net.kept, 0.5, net.training)


def keeps_its_output(net, x):
    net.kept = x
    return x


def keeps_a_mask(net, x):
    if net.kept is None:
        net.kept = torch.ones(x.shape[1])
    return x * net.kept


def counts_for_a_log(net, x):
    net.count += 1
    return x


def loss(output, batch):
    return (output - batch[1]).square().mean()


def found_of(does):
    recipe = shoal.Recipe(model=lambda hp: Net(does), data=lambda hp: ([BATCH], None), loss=loss)
    model = Net(does)
    before = in_words(attributes_of(model))
    model(BATCH[0])
    names = changed_attributes(before, model)
    trial = TrialSpec(number=0, hp={"lr": 1e-3}, seed=0)
    return names, why_changes_matter(recipe, trial, BATCH, names)


@pytest.mark.parametrize("does", [begins, opens, anneals, draws_a_table])
def test_what_later_forwards_depend_on_is_named(does):
    names, words = found_of(does)

    assert names
    assert f"a forward changes {min(names)}, and forwards after it compute something else" in words


class Cell(nn.Module):
    """A state from batch to batch, which begins anew where the batch says so."""

    def __init__(self, asks=bool):
        super().__init__()
        self.layer, self.state, self.asks = nn.Linear(6, 6), None, asks

    def forward(self, x, begins):
        if self.asks(begins):
            self.state = torch.zeros_like(x)
        found = self.layer(x) + self.state
        self.state = x.detach()
        return found


def behind_a_check(begins):
    assert torch.isfinite(begins).all()
    return begins > 0


FLAGS = {
    "a bool": (True, bool),
    "a text": ("begin", lambda begins: begins == "begin"),
    "a tensor": (torch.tensor(True), bool),
    "its item": (torch.tensor(1), lambda begins: begins.item() == 1),
    "an int of it": (torch.tensor(1), lambda begins: int(begins) > 0),
    "a list of it": (torch.tensor([1]), lambda begins: begins.tolist() == [1]),
    "an array of it": (torch.tensor([1]), lambda begins: begins.numpy()[0] == 1),
    "behind a check": (torch.tensor(1.0), behind_a_check),
}


@pytest.mark.parametrize(("flag", "asks"), FLAGS.values(), ids=FLAGS)
def test_a_state_that_begins_anew_where_the_batch_says_so_matters(flag, asks):
    recipe = shoal.Recipe(
        model=lambda hp: Cell(asks),
        data=lambda hp: ([], None),
        inputs=tuple,
        loss=lambda o, b: o.sum(),
    )
    trial = TrialSpec(number=0, hp={"lr": 1e-3}, seed=0)

    words = why_changes_matter(recipe, trial, (BATCH[0], flag), {"the attribute 'state'"})

    assert "a forward changes the attribute 'state', and forwards after it" in words


@pytest.mark.parametrize("does", [keeps_its_output, keeps_a_mask, counts_for_a_log])
def test_what_nobody_depends_on_keeps_no_model_whole(does):
    names, words = found_of(does)

    assert names
    assert words == ""


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_first_batch_that_is_a_mapping_tells_as_much(kind):
    """Also where torch's pytrees do not look into it, as of transformers' tokenizers."""
    batch = kind(x=BATCH[0], y=BATCH[1])
    recipe = shoal.Recipe(
        model=lambda hp: Net(begins),
        data=lambda hp: ([batch], None),
        inputs=lambda batch: (batch["x"],),
        loss=lambda output, batch: (output - batch["y"]).square().mean(),
    )
    trial, names = TrialSpec(number=0, hp={"lr": 1e-3}, seed=0), {"the attribute 'kept'"}

    assert "and forwards after it compute something else" in why_changes_matter(
        recipe, trial, batch, names
    )


def test_random_numbers_go_on_as_they_were():
    torch.manual_seed(3)
    model = Net(draws_a_table)
    recipe = shoal.Recipe(model=lambda hp: Net(draws_a_table), data=lambda hp: None, loss=loss)
    before = torch.get_rng_state()

    names = set(attributes_of(model))
    assert why_changes_matter(recipe, TrialSpec(number=0, hp={"lr": 0.1}, seed=0), BATCH, names)

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("does", [begins, anneals])
def test_such_a_trial_trains_whole_and_the_plan_says_why(does, run_study, assert_alone):
    recipe = shoal.Recipe(
        model=lambda hp: nn.Sequential(*(Net(does) for _ in range(3))),
        data=lambda hp: ([BATCH, (BATCH[0] * 3, BATCH[1])], None),
        loss=loss,
    )
    options = {"steps": 4, "metric": "train_loss"}

    report = run_study(recipe, shoal.grid(lr=[1e-2]), **options)

    assert_alone(report, report.trials, recipe, steps=4)
    with pytest.raises(shoal.PlanError, match=r"a forward changes the attribute '0\."):
        run_study(recipe, shoal.grid(lr=[1e-2]), technique=shoal.Spilled(shards=2), **options)


class Reverses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


class Adversary(nn.Module):
    """As domain-adversarial models have it: a count that only gradients depend on."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.calls = nn.Linear(2, 2), nn.Linear(2, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.last(Reverses.apply(self.first(x), self.calls / 10))


def test_a_count_that_only_gradients_depend_on_matters():
    recipe = shoal.Recipe(
        model=lambda hp: Adversary(), data=lambda hp: ([], None), loss=lambda o, b: o.sum()
    )
    trial = TrialSpec(number=0, hp={}, seed=0)

    why = why_changes_matter(recipe, trial, torch.ones(3, 2), {"the attribute 'calls'"})

    assert "forwards after it compute something else" in why
