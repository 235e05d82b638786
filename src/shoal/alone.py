"""A model that is trained alone, in plain PyTorch: the loop, and what it is made of.

``shoal.plain`` says what is trained so; nothing here knows of studies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import SpecError, TrialError
from shoal.core.spec import Place
from shoal.pipeline.sums import CopiesInTurn
from shoal.pystate import Attributes, ambient
from shoal.recipes.bound import bound, clip_limit
from shoal.recipes.ownstep import (
    Losses,
    Modes,
    OwnStep,
    Tally,
    own_evaluation,
    refuse_nonfinite,
    require_evaluation,
    summed_up,
)
from shoal.recipes.recipe import (
    HP,
    Batch,
    Recipe,
    autocast,
    build_model,
    chunks,
    compute_loss,
    evaluate_metrics,
    model_inputs,
    read_data,
    rounding_of,
    to_device,
)
from shoal.recipes.schedules import (
    advance,
    build_schedule,
    catch_up,
    state_of_schedule,
    steps_of_epoch,
)
from shoal.recipes.steppers import (
    Stepper,
    WhichWeights,
    copy_model,
    copy_state,
    make_stepper,
    versions_of,
)
from shoal.replicas import Replicas
from shoal.rng import RngState, capture_rng, restore_rng, seed_all


@dataclass(frozen=True, kw_only=True)
class PlainResult:
    """A model trained alone, and all that it ended with.

    ``losses`` has one float per optimizer step: the sum of the undivided micro-batch
    losses over their number. ``history`` has one row per evaluation: ``step`` and
    ``epoch`` (both from 1), ``seconds``, ``metrics``. ``parameters`` are the tensors the
    optimizer steps, by name: the model's own, or their host copies.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    parameters: Mapping[str, nn.Parameter]
    losses: tuple[float, ...]
    history: tuple[dict[str, Any], ...]
    metrics: Mapping[str, float]
    rng: RngState
    step: int
    kept: Mapping[str, Any] = field(default_factory=dict)  # in Python, by its objects

    def state(self) -> dict[str, Any]:
        """The layout of ``TrialResult.load_state()``: everything by parameter name."""
        return {
            "model": {  # modules may add what is no tensor
                name: value.cpu() if isinstance(value, Tensor) else value
                for name, value in self.model.state_dict().items()
            },
            "optimizer": optimizer_state(self.optimizer, self.parameters),
            "schedule": state_of_schedule(self.schedule, self.model),
            "rng": self.rng,
            "step": self.step,
        }


@dataclass(frozen=True, kw_only=True)
class PlainSource:
    """What a training goes on from: ``result`` at the same step, and ``hp`` from there on."""

    result: PlainResult
    hp: HP


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a plain loop is asked for: the options of ``plain_loop``, made ready."""

    recipe: Recipe  # its batches are in pieces
    seed: int
    steps: int | None
    epochs: int | None
    eval_every: int | None
    device: torch.device
    place: Place
    ignores_nonfinite: bool
    clock: Callable[[], float]
    inherits: Mapping[int, PlainSource]
    weights: WhichWeights
    replicas: int
    sharded: bool
    copies: int
    after_step: Callable[[int, nn.Module], None] | None


class _Learner:
    """A model and all that takes its steps: gradients, optimizer, schedule."""

    def __init__(self, asked: Asked, hp: HP, model: nn.Module, train: Iterable[Batch]) -> None:
        recipe = bound(asked.recipe, hp)
        asked = replace(asked, recipe=recipe)
        self.hp, self.model, self.modes = hp, model, Modes(recipe, model)
        self.stepper = make_stepper(recipe, model, hp, asked.place)
        self.schedule = build_schedule(recipe, self.stepper.optimizer, hp, train)
        self._recipe, self._device = recipe, asked.device
        self._ignores_nonfinite = asked.ignores_nonfinite
        self._rounding = rounding_of(recipe, self.stepper.parameters, asked.seed)
        self._versions = versions_of(model, asked.weights)
        self._take = _gradients(asked, model)
        is_own = recipe.step is not None
        self._own = OwnStep(recipe, model, self.optimizer, hp, self.modes) if is_own else None
        self.attributes = Attributes(model, self.optimizer, self.schedule)
        ambient.built(self.attributes.fixed())

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.stepper.optimizer

    def step(self, group: Iterable[Batch], number: int) -> Losses:
        """Take a step with a group of batches; ``number`` is the step's, from 0."""
        losses = self._own_step(group, number) if self._own else self._plain_step(group, number)
        if self.schedule:
            self.schedule.step()
        return losses

    def _plain_step(self, group: Iterable[Batch], number: int) -> Losses:
        self.stepper.zero_grad()
        self._versions.before_gradients()
        loss = self._take.backward_group(group, number)
        if not (self._ignores_nonfinite or math.isfinite(loss)):
            raise TrialError(_nonfinite(loss, number + 1))
        if limit := clip_limit(self._recipe):
            self._take.clip(limit)
        self._versions.before_step()
        with self._rounding.stepping(self.stepper.parameters, number):
            self._take.step(self.stepper)
        self.stepper.publish()
        self._versions.after_step()
        return Losses(loss)

    def _own_step(self, group: Iterable[Batch], number: int) -> Losses:
        """A step of the recipe's own on the one batch of a group."""
        (fetched,) = group
        assert self._own is not None
        losses = self._own(to_device(fetched, self._device), number)
        refuse_nonfinite(self._recipe, losses, number + 1, ignore=self._ignores_nonfinite)
        return losses

    def take_over(self, source: PlainResult, steps: int) -> None:
        """Go on after ``steps`` steps with what the optimizer of ``source`` keeps."""
        parameters = self.stepper.parameters
        copy_state(source.optimizer, source.parameters, self.optimizer, parameters)
        catch_up(self.schedule, steps)
        self.attributes.give(source.kept, self._device, scheduled=False)


class Training:
    """A model that is trained alone: the loop, and what came of it so far.

    Draws from the random streams as they are when it is made: ``seed_all`` comes before.
    """

    def __init__(self, asked: Asked, hp: HP) -> None:
        self._asked, self._recipe = asked, asked.recipe
        model = build_model(self._recipe, hp).to(asked.device)
        self._train, self._valid = read_data(self._recipe, hp)
        require_evaluation(self._recipe, model, self._valid)
        self._learner = _Learner(asked, hp, model, self._train)
        self._tally = Tally()
        self._losses: list[float] = []
        self._history: list[dict[str, Any]] = []
        self._started = asked.clock()

    def run(self) -> None:
        """Train to the end that was asked for."""
        asked = self._asked
        for epoch in itertools.count(1):
            self._run_epoch(epoch)
            is_done = len(self._losses) == asked.steps or epoch == asked.epochs
            if is_done or not asked.eval_every:
                self._record(epoch)
            if is_done:
                return
            if not asked.eval_every:
                self._inherit()

    def _run_epoch(self, epoch: int) -> None:
        """All of an epoch, or what of it is left to do."""
        asked, before = self._asked, len(self._losses)
        self._learner.modes.train()
        for group in chunks(self._train, self._recipe.accumulate):
            self._step(group)
            if asked.eval_every and len(self._losses) % asked.eval_every == 0:
                self._record(epoch)
                self._inherit()
            if len(self._losses) == asked.steps:
                break
        if len(self._losses) == before:
            raise SpecError(f"train data has no batches in epoch {epoch}; it needs one or more.")

    def _step(self, group: Iterable[Batch]) -> None:
        losses = self._learner.step(group, len(self._losses))
        self._tally.add(losses.named)
        self._losses.append(losses.total)
        if self._asked.after_step:
            with _restored_rng(self._asked.device):
                self._asked.after_step(len(self._losses), self._learner.model)
            self._learner.modes.train()

    def _record(self, epoch: int) -> None:
        """Evaluate after this step, unless that has been done."""
        step, learner = len(self._losses), self._learner
        since = self._history[-1]["step"] if self._history else 0
        if since == step:
            return
        losses = self._losses[since:]
        metrics = {"train_loss": sum(losses) / len(losses), **self._tally.take()}
        if self._valid is not None:
            device = self._asked.device
            metrics |= evaluate(self._recipe, learner.model, self._valid, device, learner.hp)
        seconds = self._asked.clock() - self._started
        each = steps_of_epoch(self._recipe, self._train)
        advance(learner.schedule, metrics, step, self._asked, each)
        row = {"step": step, "epoch": epoch, "seconds": seconds, "metrics": metrics}
        self._history.append(row)
        learner.modes.train()

    def _inherit(self) -> None:
        """Go on from another training's state, if that is asked for after this step."""
        source = self._asked.inherits.get(len(self._losses))
        if source is None:
            return
        with _restored_rng(self._asked.device):  # its own streams and data go on as they were
            seed_all(self._asked.seed)
            model = build_model(self._recipe, source.hp).to(self._asked.device)
            copy_model(source.result.model, model)
            self._learner = _Learner(self._asked, source.hp, model, self._train)
        self._learner.take_over(source.result, len(self._losses))
        self._learner.modes.train()

    def result(self) -> PlainResult:
        """What it ended with; the random streams are those of now."""
        learner = self._learner
        return PlainResult(
            model=learner.model,
            optimizer=learner.optimizer,
            schedule=learner.schedule,
            parameters=learner.stepper.parameters,
            losses=tuple(self._losses),
            history=tuple(self._history),
            metrics=self._history[-1]["metrics"],
            rng=capture_rng(self._asked.device),
            step=len(self._losses),
            kept=learner.attributes.changed()[0],
        )


class _Alone:
    """Gradients of whole batches, as anyone would take them."""

    def __init__(self, recipe: Recipe, model: nn.Module, device: torch.device) -> None:
        self._recipe, self._model, self._device = recipe, model, device

    def backward_group(self, group: Iterable[Batch], step: int) -> float:
        return backward_group(self._recipe, self._model, group, self._device)

    def step(self, stepper: Stepper) -> None:
        stepper.step()

    def clip(self, limit: float) -> None:
        nn.utils.clip_grad_norm_(self._model.parameters(), limit)


def _gradients(asked: Asked, model: nn.Module) -> _Alone | Replicas | CopiesInTurn:
    if asked.replicas > 1 and asked.copies > 1:
        raise SpecError(
            f"replicas={asked.replicas} and copies={asked.copies}: a training has one of them."
        )
    if asked.copies > 1:
        return CopiesInTurn(asked.recipe, model, asked.device, asked.copies)
    if asked.replicas == 1:
        return _Alone(asked.recipe, model, asked.device)
    return Replicas(
        asked.recipe,
        model,
        asked.seed,
        asked.device,
        width=asked.replicas,
        sharded=asked.sharded,
    )


def backward_group(
    recipe: Recipe, model: nn.Module, group: Iterable[Batch], device: torch.device
) -> float:
    """Add the gradients of one optimizer step's batches; returns their mean loss.

    Every loss is divided by ``recipe.accumulate``, also in a short last group.
    """
    total, count = 0.0, 0
    for fetched in group:
        batch = to_device(fetched, device)
        with autocast(recipe, device):
            arguments, keywords = model_inputs(recipe, batch)
            loss = compute_loss(recipe, model(*arguments, **keywords), batch)
        (loss / recipe.accumulate).backward()  # torch's own
        total, count = total + float(loss.detach()), count + 1
    return total / count


def evaluate(
    recipe: Recipe,
    model: nn.Module,
    valid: Iterable[Batch],
    device: torch.device,
    hp: HP = MappingProxyType({}),
) -> dict[str, float]:
    """Means over the validation batches, unweighted; leaves the random streams as they were.

    The model is left in evaluation mode. The metrics are computed outside autocast. ``hp`` is
    for a recipe that evaluates itself, or whose loss or metrics take them.

    Raises:
        SpecError: there is no batch.
    """
    model.eval()
    recipe = bound(recipe, hp)
    with _restored_rng(device), torch.no_grad():
        found = [
            _evaluate_batch(recipe, model, to_device(fetched, device), device, hp)
            for fetched in valid
        ]
    if not found:
        raise SpecError(
            "the validation data yielded no batch. Recipe(data=...) must return a source that "
            "yields at least one batch each time it is read, or None."
        )
    return summed_up(recipe, found)


def _evaluate_batch(
    recipe: Recipe, model: nn.Module, batch: Batch, device: torch.device, hp: HP
) -> dict[str, float]:
    if recipe.evaluate is not None:
        return own_evaluation(recipe, model, batch, hp)
    with autocast(recipe, device):
        arguments, keywords = model_inputs(recipe, batch)
        output = model(*arguments, **keywords)
        loss = compute_loss(recipe, output, batch)
    return evaluate_metrics(recipe, loss, output, batch)


def _nonfinite(loss: float, step: int) -> str:
    return (
        f"the loss of step {step} is {loss}. Lower the learning rate or clip the gradients, "
        "or train on with Recipe(on_nonfinite='ignore')."
    )


@contextmanager
def _restored_rng(device: torch.device) -> Iterator[None]:
    """Put the random streams back on the way out."""
    saved = capture_rng(device)
    try:
        yield
    finally:
        restore_rng(saved, device)


@contextmanager
def borrowed_process(threads: int, device: torch.device) -> Iterator[None]:
    """This process with ``threads`` threads; threads and random streams as before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with _restored_rng(device):
            yield
    finally:
        torch.set_num_threads(before)


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """State and param groups by parameter name; tensors are shared, on the CPU if they can be.

    What is kept for no parameter, or empty, is left out, as it is of what is saved.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    state = {
        names[id(parameter)]: {
            key: value.cpu() if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }
        for parameter, entries in optimizer.state.items()
        if entries and id(parameter) in names
    }
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "groups": groups}
