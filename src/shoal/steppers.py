"""How a plain loop steps: the recipe's optimizer over a model, and one that goes on from another.

What ``shoal.testing.plain_loop`` is made of, beside the recipe's own functions.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from shoal.core.spec import Place
from shoal.recipe import HP, Recipe, build_optimizer


class Stepper(Protocol):
    """One optimizer over a model's parameters, wherever it steps."""

    optimizer: torch.optim.Optimizer
    parameters: dict[str, nn.Parameter]

    def zero_grad(self) -> None: ...
    def step(self) -> None: ...


def make_stepper(recipe: Recipe, model: nn.Module, hp: HP, place: Place) -> Stepper:
    """The recipe's optimizer over the model's parameters, or over copies of them on the host."""
    kind = _HostStepper if place == "host" else _DeviceStepper
    return kind(recipe, model, hp)


class _DeviceStepper:
    """The ordinary case: the optimizer steps the model's own parameters."""

    def __init__(self, recipe: Recipe, model: nn.Module, hp: HP) -> None:
        self.parameters = dict(model.named_parameters())
        self.optimizer = build_optimizer(recipe, self.parameters.items(), hp)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        self.optimizer.step()


class _HostStepper:
    """The optimizer steps copies in host memory; gradients go down, weights come up."""

    def __init__(self, recipe: Recipe, model: nn.Module, hp: HP) -> None:
        self._on_device = dict(model.named_parameters())
        self.parameters = {
            name: nn.Parameter(parameter.detach().cpu().clone(), parameter.requires_grad)
            for name, parameter in self._on_device.items()
        }
        for name, parameter in self._on_device.items():
            if parameter.requires_grad:
                self.parameters[name].grad_dtype = parameter.grad_dtype
        self.optimizer = build_optimizer(recipe, self.parameters.items(), hp)

    def zero_grad(self) -> None:
        """As the optimizer would: what it does not hold keeps its gradient."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for name, parameter in self._on_device.items():
            if id(self.parameters[name]) in held:
                parameter.grad = None

    def step(self) -> None:
        for name, parameter in self._on_device.items():
            gradient = parameter.grad
            self.parameters[name].grad = None if gradient is None else gradient.cpu()
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self._on_device.items():
                parameter.copy_(self.parameters[name])


def copy_model(source: nn.Module, model: nn.Module) -> None:
    """Give ``model`` all that ``source`` learnt: weights, and buffers no state dict keeps too."""
    model.load_state_dict(source.state_dict())
    theirs = dict(source.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(theirs[name])


def copy_state(
    source: torch.optim.Optimizer,
    theirs: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    own: Mapping[str, nn.Parameter],
) -> None:
    """Give an optimizer what ``source`` keeps per parameter; its groups' options stay its own.

    Args:
        theirs: The parameters that ``source`` steps, by name.
        own: Those that ``optimizer`` steps.
    """
    for name, parameter in own.items():
        state = source.state.get(theirs[name])
        if state:
            optimizer.state[parameter] = copy.deepcopy(state)
