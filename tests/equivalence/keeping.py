"""Optimizers that keep their state as none of torch does; workers import them by name."""

from __future__ import annotations

import collections

import torch
from torch import nn
from traps import Build, Chain, data, loss

import shoal


class Clears(torch.optim.Adam):
    """Begins anew with each parameter after its fourth step."""

    def step(self, closure=None):
        super().step(closure)
        for entry in self.state.values():
            if int(entry.get("step", 0)) == 4:
                entry.clear()


class Deletes(torch.optim.Adam):
    """The same, without an entry."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in [p for p, entry in self.state.items() if int(entry["step"]) == 4]:
            del self.state[parameter]


class Replaces(torch.optim.Adam):
    """The same of all parameters that it has."""

    def step(self, closure=None):
        super().step(closure)
        if all(int(self.state[p]["step"]) == 4 for p in self.param_groups[0]["params"]):
            self.state = collections.defaultdict(dict)


class Drops(torch.optim.SGD):
    """Has one tensor of its state for a while only, and each time another entry."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            old = self.state[parameter]
            new = {"number": old.get("number", 0) + 1, "sum": old.get("sum", 0) + parameter.grad}
            if 2 < new["number"] < 5:
                new["late"] = parameter.clone()
            self.state[parameter] = new
            parameter.sub_(new["sum"] + new.get("late", 0), alpha=self.param_groups[0]["lr"])


class Alone(torch.optim.SGD):
    """Counts its steps in a state of no parameter, as MADGRAD does."""

    def step(self, closure=None):
        self.state["count"] = self.state["count"] + 1 if "count" in self.state else 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.state["count"]
        return super().step(closure)


class Wide(torch.optim.SGD):
    """Has a tensor of several numbers among its options."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.param_groups[0]["scales"] = torch.tensor([1.0, 2.0])

    def step(self, closure=None):
        for group in self.param_groups:
            group["scales"] = group["scales"] * 0.5
            group["lr"] = float(group["scales"].sum()) / 10
        return super().step(closure)


class Sliced(torch.optim.SGD):
    """Keeps a number of a vector with the vector's stride, as Prodigy does."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["first"] = parameter.detach().flatten()[:3:3]


class Keeps(torch.optim.SGD):
    """Halves gradients where others clear them."""

    def zero_grad(self, set_to_none=True):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Counts(torch.optim.SGD):
    """Counts how often gradients are cleared."""

    cleared = 0

    def zero_grad(self, set_to_none=True):
        self.cleared += 1
        super().zero_grad(set_to_none)


class Turns(torch.optim.SGD):
    """Keeps bases in a list, as SOAP does, which lie by columns; products round by that."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            entry, grad = self.state[parameter], parameter.grad.reshape(len(parameter), -1)
            square = grad @ grad.T
            (basis,) = entry.get("bases", [torch.eye(len(square))])
            entry["bases"] = [torch.linalg.qr(basis + square @ basis)[0]]
            turned = basis @ (basis.T @ grad).sign()
            parameter.sub_(turned.view_as(parameter), alpha=self.param_groups[0]["lr"])


class Weighs(torch.optim.SGD):
    """Steps by sums that its groups have had so far, as schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["sum"] = group.get("sum", 0.0) + group["k"] ** 0.5
            group["lr"] = 0.05 * group["k"] ** 0.5 / group["sum"]
        return super().step(closure)


class WeighsTrained(torch.optim.SGD):
    """The same, of groups with a gradient only, and what it counts is gone every third time."""

    def step(self, closure=None):
        for group in self.param_groups:
            if all(p.grad is None for p in group["params"]):
                continue
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.05 / group["k"]
            if group["k"] == 3:
                del group["k"]
        return super().step(closure)


KINDS = (
    Clears,
    Deletes,
    Replaces,
    Drops,
    Alone,
    Wide,
    Sliced,
    Keeps,
    Counts,
    Turns,
    Weighs,
    WeighsTrained,
)


def make(named, hp):
    kind = {kind.__name__: kind for kind in KINDS}[hp["kind"]]
    return kind([p for _, p in named], lr=hp["lr"])


def in_groups(named, hp):
    """Two groups of which every shard has some, and one of the last layer alone."""
    last = {name: p for name, p in named if name.startswith("leave")}
    biases = [p for name, p in named if name.endswith("bias") and name not in last]
    weights = [p for name, p in named if not name.endswith("bias") and name not in last]
    kind = {kind.__name__: kind for kind in KINDS}[hp["kind"]]
    groups = [{"params": biases}, {"params": weights, "weight_decay": 0.1}]
    return kind([*groups, {"params": [*last.values()]}], lr=hp["lr"])


def clipping_hook(named, hp):
    """Clips by the norm of all gradients, of the optimizer that its closure has."""
    optimizer = torch.optim.Adam([p for _, p in named], lr=hp["lr"])

    def clip(*_):
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def recipe(optimizer=make, **changes):
    settings = {"model": Build(Chain), "data": data, "loss": loss, "optimizer": optimizer}
    return shoal.Recipe(**(settings | changes))


def tensor_rate(named, hp):
    """All groups have the one tensor, and a schedule writes to it."""
    parameters = [p for _, p in named]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:]}]
    return torch.optim.SGD(groups, lr=torch.tensor(hp["lr"]))


def by_the_rate_of_now(optimizer, hp):
    """Halves the rate every second time: what it looks at is the tensor that is written to."""
    begun = optimizer.defaults["lr"]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 if begun > 0.007 else 1.0)


def beside_another(named, hp):
    """One of several optimizers keeps something for no parameter."""
    parameters = [p for _, p in named]
    return [Alone(parameters[:3], lr=hp["lr"]), torch.optim.Adam(parameters[3:], lr=hp["lr"])]
