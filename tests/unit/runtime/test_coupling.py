"""Which optimizers may step layers apart, and which tensors."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from shoal.core.spec import TrialSpec
from shoal.recipes.recipe import Recipe
from shoal.runtime.measuring.coupling import ELEMENTWISE, Coupling, coupling_of

LAYERS = [["0.weight", "0.bias"], ["1.weight", "1.bias"]]


class OfLayers(torch.optim.SGD):
    """Scales the gradients of two tensors, a layer's, by their common norm."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        for layer in zip(parameters[::2], parameters[1::2], strict=False):
            norm = torch.stack([p.grad.norm() for p in layer]).norm()
            for parameter in layer:
                parameter.grad /= norm
        return super().step(closure)


class OfAll(torch.optim.SGD):
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.grad /= norm
        return super().step(closure)


class InPairs(torch.optim.SGD):
    """Cannot step one tensor."""

    def step(self, closure=None):
        if sum(len(group["params"]) for group in self.param_groups) < 2:
            raise ValueError("one tensor")
        return super().step(closure)


class Counts(torch.optim.SGD):
    def step(self, closure=None):
        self.calls = getattr(self, "calls", 0) + 1
        return super().step(closure)


class CountsInGroups(torch.optim.SGD):
    """What it counts matters much later."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


class CountsTogether(torch.optim.SGD):
    """Has one object for what it counts."""

    def step(self, closure=None):
        for group in self.param_groups:
            group.setdefault("counts", []).append(1)
        return super().step(closure)


class CountsParts(torch.optim.SGD):
    """Counts something else than steps."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["parameters"] = len(group["params"])
        return super().step(closure)


class LooksAhead(torch.optim.SGD):
    """Keeps slow copies in a list, in the order of all parameters."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.slow = [p.detach().clone() for p in parameters]

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for fast, slow in zip(self.param_groups[0]["params"], self.slow, strict=False):
                fast.copy_(slow.lerp_(fast, 0.5))


def shrunk(parameters, lr):
    """A hook of which every shard would have its own."""
    parameters = list(parameters)

    def to_one_norm(optimizer, args, kwargs):
        with torch.no_grad():
            norm = torch.stack([p.norm() for p in parameters]).norm()
            for parameter in parameters:
                parameter /= norm

    optimizer = torch.optim.SGD(parameters, lr=lr)
    optimizer.register_step_post_hook(to_one_norm)
    return optimizer


def clipped(parameters, lr):
    """A hook that finds the gradients of all, where they are there."""
    optimizer = torch.optim.SGD(parameters, lr=lr)

    def to_one_norm(*_):
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)

    optimizer.register_step_pre_hook(to_one_norm)
    return optimizer


def averaged(parameters, lr):
    """A hook that keeps averages of all, for later."""
    optimizer = torch.optim.SGD(parameters, lr=lr)

    def average(*_):
        with torch.no_grad():
            for parameter in parameters:
                entry = optimizer.state[parameter]
                entry.setdefault("average", parameter.clone()).lerp_(parameter, 0.2)

    optimizer.register_step_post_hook(average)
    return optimizer


def averaged_in(container):
    """The same, within something."""

    def kind(parameters, lr):
        optimizer = torch.optim.SGD(parameters, lr=lr)

        def average(*_):
            for parameter in parameters:
                optimizer.state[parameter]["kept"] = container(parameter.detach().sum())

        optimizer.register_step_post_hook(average)
        return optimizer

    return kind


class Timed(torch.optim.SGD):
    """Keeps what is another one in each run."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] |= {"at": time.monotonic_ns(), "object": [id(parameter)]}


class LaterCounts(torch.optim.SGD):
    """Counts in a state of no parameter, for later."""

    def step(self, closure=None):
        self.state["count"] = self.state["count"] + 1 if "count" in self.state else 1
        return super().step(closure)


def coupling(kind):
    recipe = Recipe(
        model=lambda hp: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
        data=lambda hp: ([], None),
        loss=lambda output, batch: output.sum(),
        optimizer=lambda named, hp: kind([p for _, p in named], lr=0.1),
    )
    return coupling_of(recipe, TrialSpec(number=0, hp={}, seed=3), LAYERS)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_of_single_tensors_steps_them_apart(kind):
    assert coupling(kind) == ("", True)


def test_what_is_counted_in_groups_is_counted_once():
    assert coupling(CountsInGroups) == ("", True)


@pytest.mark.parametrize("kind", [OfLayers, InPairs])
def test_one_that_needs_all_of_a_layer_steps_layers_apart(kind):
    assert coupling(kind) == ("", False)


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (OfAll, "optimizer OfAll couples"),
        (Counts, "keeps 'calls'"),
        (CountsTogether, "changes 'counts'"),
        (CountsParts, "changes 'parameters'"),
        (LooksAhead, "optimizer LooksAhead cannot step the parameters of a shard by themselves"),
        (shrunk, "SGD, with the step hook 'shrunk.<locals>.to_one_norm', cannot step the"),
        (clipped, "SGD, with the step hook 'clipped.<locals>.to_one_norm', couples"),
        (averaged, "a shard at a time leaves another 'average' in the state of '0."),
        (LaterCounts, "changes 'count' of its state at each step"),
    ],
)
def test_one_that_needs_all_of_the_model_says_why(kind, word):
    found = coupling(kind)
    assert word in found.why
    assert not found.by_tensor


@pytest.mark.parametrize(
    "container",
    [
        lambda mean: [mean, 3],
        lambda mean: {"mean": (mean,)},
        lambda mean: mean.numpy(),
        lambda mean: str(mean.item()),
        lambda mean: complex(mean.item()),
    ],
    ids=["list", "dict", "array", "text", "complex"],
)
def test_what_steps_keep_within_something_is_compared_too(container):
    assert "a shard at a time leaves another 'kept'" in coupling(averaged_in(container)).why


def test_what_is_another_one_in_each_run_says_nothing():
    assert coupling(Timed).why == ""


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_what_is_said_of_torchs_own_is_what_steps_come_to(kind):
    assert coupling(kind) == Coupling("", by_tensor=True)


def test_torchs_own_are_not_tried_but_one_with_a_hook_is():
    def refuse(hp):
        raise AssertionError("a model is built")

    recipe = Recipe(model=refuse, data=lambda hp: ([], None), loss=lambda output, batch: None)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    trial = TrialSpec(number=0, hp={}, seed=3)

    assert coupling_of(recipe, trial, LAYERS, optimizer) == Coupling("", by_tensor=True)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(Exception, match="a model is built"):
        coupling_of(recipe, trial, LAYERS, optimizer)
