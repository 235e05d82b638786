"""What the functions of a recipe may not be: told before any of them is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import loss as losses

from shoal.core.errors import SpecError

_CALLS = {
    "model": ("hp",),
    "data": ("hp",),
    "loss": ("output", "batch"),
    "inputs": ("batch",),
    "optimizer": ("named_parameters", "hp"),
    "schedule": ("optimizer", "hp"),
    "step": ("models", "batch", "optimizers", "hp"),
    "evaluate": ("models", "batch", "hp"),
}
"""What a recipe's functions are called with."""
_BY_NAME = {"loss": "hp", "step": "number"}
"""What they are given by its name where they have it."""
_OPTIONAL = ("loss", "inputs", "optimizer", "schedule", "step", "evaluate")


def check_functions(given: Mapping[str, object]) -> None:
    """Look at a recipe's functions by the names of its arguments.

    Raises:
        SpecError: one is no function, or one that is called with other arguments than it gets.
    """
    for name in ("model", "data"):
        _require_callable(name, given[name])
    for name in _OPTIONAL:
        if given[name] is not None:
            _require_callable(name, given[name])
    _refuse_made_model(given["model"])
    _refuse_class_of_optimizers(given["optimizer"])
    for name, called in _CALLS.items():
        _require_arguments(f"Recipe({name}=...)", given[name], called, _BY_NAME.get(name))


def check_metrics(metrics: object) -> None:
    """Look at a recipe's metrics.

    Raises:
        SpecError: they are no functions by name, or one is called as the loss is.
    """
    if not isinstance(metrics, Mapping):
        raise SpecError(
            f"Recipe(metrics=...) is a dict, as in {{'accuracy': function}}, got {metrics!r}."
        )
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name:
            raise SpecError(f"a metric's name is a string that is not empty, got {name!r}.")
        if name in ("loss", "valid_loss"):
            raise SpecError(
                f"Recipe(metrics=...) has one called {name!r}, and valid_loss is the mean of the "
                "recipe's loss over the validation batches. Give it another name."
            )
        refuse_said_twice("Recipe(metrics=...)", name)
        _require_callable(f"metrics[{name!r}]", metric)
        _require_arguments(f"Recipe(metrics[{name!r}]=...)", metric, _CALLS["loss"], "hp")


def refuse_said_twice(what: str, name: str) -> None:
    """Look at a name that something is found under in a validation.

    Raises:
        SpecError: it says so itself, and would be recorded as valid_valid_...
    """
    if name.startswith("valid_"):
        short = name.removeprefix("valid_") or "score"
        raise SpecError(
            f"{what} has the name {name!r}, and what is found in a validation is recorded as "
            f"valid_NAME, which would be {f'valid_{name}'!r}. Call it {short!r}; "
            f"Study(metric='valid_{short}') ranks by it."
        )


def check_schedule(given: Mapping[str, Any]) -> None:
    """Look at when a recipe's schedule is stepped, by the names of its arguments.

    Raises:
        SpecError: there is none, or a metric that it does not go by, or that nobody measures.
    """
    interval, metric = given["schedule_interval"], given["schedule_metric"]
    if interval != "step" and given["schedule"] is None:
        raise SpecError(f"Recipe(schedule_interval={interval!r}) has no schedule: give schedule=.")
    if interval != "evaluation" and metric != "valid_loss":
        raise SpecError(
            f"Recipe(schedule_metric={metric!r}) is for a schedule that goes by evaluations. Give "
            "schedule_interval='evaluation' too."
        )
    known = ["valid_loss", *(f"valid_{name}" for name in given["metrics"])]
    if interval == "evaluation" and given["step"] is None and metric not in known:
        raise SpecError(
            f"Recipe(schedule_metric={metric!r}) is none of what evaluations find: "
            f"{', '.join(known)}."
        )


def _require_callable(name: str, value: object) -> None:
    if not callable(value):
        raise SpecError(f"Recipe({name}=...) is a callable, got {type(value).__name__}: {value!r}")


def _require_arguments(
    what: str, function: Any, called: Sequence[str], by_name: str | None
) -> None:
    """Refuse a function that cannot be called so; one that does not say how is taken."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    for more in ({}, {by_name: None} if by_name else {}):
        try:
            signature.bind(*called, **more)
        except TypeError:
            continue
        return
    name = getattr(function, "__name__", type(function).__name__)
    raise SpecError(
        f"{what} is called as ({', '.join(called)}), got {name}, which takes {signature}. Write "
        "it with these arguments."
    )


def _refuse_made_model(model: object) -> None:
    if isinstance(model, nn.Module):
        kind = type(model).__name__
        raise SpecError(
            f"Recipe(model=...) is a function (hp) -> nn.Module that makes a model for each "
            f"trial, got a {kind} that is made already. Write model=lambda hp: {kind}(...)."
        )


def _refuse_class_of_optimizers(optimizer: object) -> None:
    kind = optimizer.func if isinstance(optimizer, functools.partial) else optimizer
    name = getattr(kind, "__name__", "")
    if name and getattr(torch.optim, name, None) is kind:
        raise SpecError(
            f"Recipe(optimizer=...) is a function (named_parameters, hp) -> Optimizer, got the "
            f"class {name}. Write optimizer=lambda named, hp: "
            f"{name}([p for _, p in named], lr=hp['lr'])."
        )


def check_loss(loss: object, batch: object) -> None:
    """Look at a recipe's loss beside a batch of its data.

    Torch's own losses take an output and a target: a batch that is one tensor, or nobody has said
    which part of it that is.

    Raises:
        SpecError: it is such a loss, and the batch is no tensor.
    """
    name = ""
    if isinstance(batch, torch.Tensor):
        return
    if isinstance(loss, nn.Module) and type(loss).__module__ == losses.__name__:
        name = f"{type(loss).__name__}()"
    called = getattr(loss, "__name__", "")
    if called and getattr(nn.functional, called, None) is loss:
        name = f"F.{called}"
    if name:
        raise SpecError(
            f"Recipe(loss=...) is a function of the model's output and the whole batch, got "
            f"{name}, which takes an output and a target, and a batch is a "
            f"{type(batch).__name__}. Write loss=lambda output, batch: "
            f"{name}(output, batch[1]), if the target is the batch's second item."
        )
