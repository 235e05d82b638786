"""How a plain loop steps: the recipe's optimizer over a model, and one that goes on from another.

What ``shoal.testing.plain_loop`` is made of, beside the recipe's own functions.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from shoal.core.errors import SpecError
from shoal.core.spec import Place
from shoal.recipes.optimizers import build_optimizer, build_optimizer_of
from shoal.recipes.recipe import HP, Recipe


class Stepper(Protocol):
    """One optimizer over a model's parameters, wherever it steps."""

    optimizer: torch.optim.Optimizer
    parameters: dict[str, nn.Parameter]

    def zero_grad(self) -> None: ...
    def step(self) -> None: ...
    def publish(self) -> None:
        """The step is over, its weights rounded: the model gets them."""


def make_stepper(recipe: Recipe, model: nn.Module, hp: HP, place: Place) -> Stepper:
    """The recipe's optimizer over the model's parameters, or over copies of them on the host.

    Raises:
        SpecError: a step of one's own on the host: it steps where its models are.
    """
    if recipe.step is not None and place == "host":
        raise SpecError("a step of one's own, Recipe(step=...), steps on the device.")
    kind = _HostStepper if place == "host" else _DeviceStepper
    return kind(recipe, model, hp)


class _DeviceStepper:
    """The ordinary case: the optimizer steps the model's own parameters."""

    def __init__(self, recipe: Recipe, model: nn.Module, hp: HP) -> None:
        self.parameters = dict(model.named_parameters())
        self.optimizer = build_optimizer_of(recipe, model, hp)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        self.optimizer.step()

    def publish(self) -> None:
        """They are the model's."""


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

    @torch.no_grad()
    def publish(self) -> None:
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


WhichWeights = Literal["newest", "one step old", "one step old, guessed"]
"""What gradients are computed with; the last one guesses the newest from the two before it."""


class Versions:
    """The newest weights: those that the model has."""

    def before_gradients(self) -> None:
        """Have the model compute with what gradients are to be computed with."""

    def before_step(self) -> None:
        """Have the model's weights be the newest again."""

    def after_step(self) -> None:
        """The model's weights are a step newer."""


class StaleVersions(Versions):
    """Those of the step before, or a guess of the newest: see ``plain_2bw_loop``."""

    def __init__(self, model: nn.Module, predict: bool) -> None:
        self._model, self._predict = model, predict
        self._newest = self._stale = self._next = _values_of(model)

    def before_gradients(self) -> None:
        _set_values(self._model, self._stale)

    def before_step(self) -> None:
        _set_values(self._model, self._newest)

    def after_step(self) -> None:
        before, self._newest = self._newest, _values_of(self._model)
        self._stale = self._next
        self._next = _guess(before, self._newest) if self._predict else self._newest


def versions_of(model: nn.Module, weights: WhichWeights) -> Versions:
    """What of a model's weights a loop computes gradients with."""
    if weights == "newest":
        return Versions()
    return StaleVersions(model, weights != "one step old")


def _values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _set_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def _guess(before: Mapping[str, Tensor], newest: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Where the next step would lead if it were the last one again."""
    return {name: torch.add(-before[name], value, alpha=2) for name, value in newest.items()}
