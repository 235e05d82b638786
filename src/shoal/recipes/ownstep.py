"""A step of the user's own, ``Recipe(step=...)``: one call, and what is around it.

The plain loop and the workers run the same functions.

[Note: between two calls]
What outlives a call is what a trial's state is made of: parameters, buffers, the optimizers'
state and options, random streams. So before each call

    gradients    are None, as after ``zero_grad``
    modes        are those in which the factory left every module: a teacher that was put into
                 evaluation mode there stays in it
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import SpecError, TrialError
from shoal.core.values import as_number
from shoal.kernels.kernelstep import steps_by_kernel
from shoal.recipes.recipe import HP, Batch, Found, Recipe
from shoal.recipes.recipechecks import refuse_said_twice
from shoal.recipes.several import Models, members_of, models_of, optimizers_of
from shoal.recipes.wholeset import Part, WholeSet
from shoal.rng import seeded_host

LOSS = "loss"


@dataclass(frozen=True, slots=True)
class Losses:
    """What one call returned: the loss, and others by name."""

    total: float
    named: Mapping[str, float] = field(default_factory=dict)

    def nonfinite(self) -> str:
        """The name and value of the first that is not finite, in words; empty if none."""
        if not math.isfinite(self.total) and not self.named:
            return f"the loss is {self.total}"
        for name, value in self.named.items():
            if not math.isfinite(value):
                return f"the loss {name!r} is {value}"
        return "" if math.isfinite(self.total) else f"the loss is {self.total}"


class Modes:
    """In which mode every module trains: all in training mode, in a recipe without a step.

    With one, as the factory left them. To be made of a model that was just built.
    """

    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
        self._model = model
        owns = recipe.step is not None
        self._modes = [(m, m.training) for m in model.modules()] if owns else []

    def train(self) -> None:
        """Put every module into it."""
        if not self._modes:
            self._model.train()
        for module, training in self._modes:
            if module.training is not training:  # to assign is slow
                module.training = training


class OwnStep:
    """The recipe's step of one trial, to be called batch after batch.

    ``by_kernel``: its optimizers step past the Python around their kernels (``kernelstep.py``).
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        hp: HP,
        modes: Modes,
        *,
        by_kernel: bool = False,
    ) -> None:
        assert recipe.step is not None
        self._step, self._model, self._modes = recipe.step, model, modes
        self._by_kernel = members_of(optimizer) if by_kernel else ()
        self._given = models_of(model), optimizers_of(optimizer), hp
        self._takes_number = _takes_number(recipe.step)
        self._parameters = list(model.parameters())

    def __call__(self, batch: Batch, number: int, *, clears: bool = True) -> Losses:
        """One call on a batch; ``number`` is the step's, from 0. ``clears`` gradients before."""
        for parameter in self._parameters if clears else ():
            parameter.grad = None
        self._modes.train()
        models, optimizers, hp = self._given
        more = {"number": number} if self._takes_number else {}
        with steps_by_kernel(self._by_kernel):
            found = self._step(models, batch, optimizers, hp, **more)
        return losses_of(found)


def _takes_number(step: Callable[..., Any]) -> bool:
    try:
        return "number" in inspect.signature(step).parameters
    except (TypeError, ValueError):  # a callable that has no signature
        return False


def losses_of(found: Any) -> Losses:
    """What a step returned, as numbers.

    Raises:
        SpecError: neither a scalar nor a mapping of some.
    """
    if not isinstance(found, Mapping):
        return Losses(_scalar(found, ""))
    if not found:
        raise SpecError("Recipe(step=...) returned an empty mapping; return name -> loss.")
    named = {str(name): _scalar(value, str(name)) for name, value in found.items()}
    total = 0.0
    for value in named.values():
        total += value
    return Losses(named.get(LOSS, total), {k: v for k, v in named.items() if k != LOSS})


def _scalar(value: Any, name: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    if isinstance(value, int | float):
        return float(value)
    found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    where = f" under {name!r}" if name else ""
    raise SpecError(
        f"Recipe(step=...) returned {found}{where}; return the step's loss, a scalar, or a "
        "mapping name -> scalar of its losses."
    )


def refuse_nonfinite(recipe: Recipe, losses: Losses, step: int, *, ignore: bool = False) -> None:
    """A loss that is not finite ends the trial; its step has been done.

    Raises:
        TrialError: there is one, and it is not ignored. ``step`` is counted from 1.
    """
    words = losses.nonfinite()
    if words and not (ignore or recipe.on_nonfinite == "ignore"):
        raise TrialError(
            f"{words} in step {step}. A step of one's own has stepped its optimizers when it says "
            "so: what is left of the trial is its last checkpoint before. Lower a learning rate, "
            "clip the gradients in the step, or train on with Recipe(on_nonfinite='ignore')."
        )


# ---------------------------------------------------------------- means between evaluations


@dataclass(slots=True)
class Tally:
    """Sums of a step's named losses since the last evaluation; part of a trial's progress."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, named: Mapping[str, float]) -> None:
        """One step's."""
        for name, value in named.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1

    def take(self) -> dict[str, float]:
        """The means as ``train_<name>``; counts anew from here."""
        means = {f"train_{name}": total / self.counts[name] for name, total in self.sums.items()}
        self.sums, self.counts = {}, {}
        return means

    def pack(self) -> dict[str, Any]:
        """Plain containers, for a checkpoint."""
        return {name: [total, self.counts[name]] for name, total in self.sums.items()}

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> Tally:
        """The inverse."""
        return cls(
            {name: total for name, (total, _) in packed.items()},
            {name: count for name, (_, count) in packed.items()},
        )


# ---------------------------------------------------------------- evaluation


def summed_up(recipe: Recipe, found: Sequence[Found]) -> dict[str, float]:
    """What an evaluation found, of what it found of each batch: unweighted means, and the metrics
    of the whole set. The random streams of this process are left as they were."""
    values: dict[str, float] = {}
    for name in dict.fromkeys(name for one in found for name in one):
        metric = recipe.metrics.get(name.removeprefix("valid_"))
        of = [one[name] for one in found if name in one]
        if isinstance(metric, WholeSet) and isinstance(of[0], Part):
            values[name] = _of_whole(metric, of, name.removeprefix("valid_"))
        else:
            values[name] = functools.reduce(operator.add, of, 0.0) / len(found)  # one by one
    return values


def _of_whole(metric: WholeSet, parts: Sequence[Any], name: str) -> float:
    with seeded_host(0), torch.no_grad():
        value = metric.of(parts, name)
    return as_number(f"Recipe(metrics[{name!r}]=shoal.WholeSet(compute=...))", value)


def require_evaluation(recipe: Recipe, model: nn.Module, valid: Iterable[Batch] | None) -> None:
    """Several models have no one output that a loss could be asked about.

    Raises:
        SpecError: there is validation data for them, and no way to use it.
    """
    if isinstance(model, Models) and valid is not None and recipe.evaluate is None:
        raise SpecError(
            "Recipe(data=...) returned validation data and Recipe(model=...) a mapping, so what "
            "to measure is not known. Give Recipe(evaluate=...), (models, batch, hp) -> {name: "
            "value}, or return None for the validation data."
        )


def require_metric(metric: str, found: Mapping[str, float], *, has_valid: bool) -> None:
    """What a study compares is among what its trials return, which names it as they run.

    Raises:
        TrialError: it is not; a pruner would wait for it for ever.
    """
    is_default = metric == "valid_loss" and not has_valid
    if metric and metric not in found and metric != "train_loss" and not is_default:
        names = ", ".join(["train_loss", *sorted(found)])
        raise TrialError(
            f"the study's metric={metric!r} is none of what its step and its evaluation return: "
            f"{names}. Give Study(metric=...) one of these, or return it."
        )


def own_evaluation(recipe: Recipe, model: nn.Module, batch: Batch, hp: HP) -> dict[str, float]:
    """``evaluate`` of one validation batch, as ``valid_<name>``.

    The caller has switched gradients off and the modules into evaluation mode.

    Raises:
        SpecError: neither a scalar nor a mapping of some.
    """
    assert recipe.evaluate is not None
    found = recipe.evaluate(models_of(model), batch, hp)
    values = found if isinstance(found, Mapping) else {LOSS: found}
    return {f"valid_{name}": _metric(name, value) for name, value in values.items()}


def _metric(name: Any, value: Any) -> float:
    if not isinstance(name, str):
        raise SpecError(
            f"Recipe(evaluate=...) returned a value under {name!r}; return a scalar or a mapping "
            "name -> scalar."
        )
    refuse_said_twice("what Recipe(evaluate=...) returned", name)
    return as_number(f"Recipe(evaluate=...) under {name!r}", value)
