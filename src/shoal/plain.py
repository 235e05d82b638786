"""Training alone, in plain PyTorch: the definitions that trials of a study are held against.

``plain_loop`` is that of a trial alone, ``array_loop`` of one in its slot of an array,
``plain_population`` of one that went on from others' states. ``shoal.testing`` has them all.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoal.core.errors import SpecError, TrialError
from shoal.core.spec import HyperParameters, PassKind, Place
from shoal.fusion import SlotPlace, train_in_slot
from shoal.ownstep import (
    Modes,
    OwnStep,
    Tally,
    own_evaluation,
    refuse_nonfinite,
    require_evaluation,
)
from shoal.pieces import in_pieces
from shoal.recipe import (
    HP,
    Batch,
    Recipe,
    autocast,
    build_model,
    build_schedule,
    chunks,
    compute_loss,
    model_inputs,
    read_data,
    rounding_of,
    to_device,
)
from shoal.replicas import Replicas
from shoal.rng import RngState, capture_rng, restore_rng, seed_all
from shoal.steppers import Stepper, WhichWeights, copy_model, copy_state, make_stepper, versions_of


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

    def state(self) -> dict[str, Any]:
        """The layout of ``TrialResult.load_state()``: everything by parameter name."""
        return {
            "model": {name: tensor.cpu() for name, tensor in self.model.state_dict().items()},
            "optimizer": optimizer_state(self.optimizer, self.parameters),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "rng": self.rng,
            "step": self.step,
        }


def plain_loop(
    recipe: Recipe,
    hp: HP,
    seed: int,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    threads: int = 1,
    device: str | torch.device = "cpu",
    optimizer: Place = "device",
    eval_every: int | None = None,
    on_nonfinite: Literal["fail", "ignore"] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    inherits: Mapping[int, PlainSource] = MappingProxyType({}),
    weights: WhichWeights = "newest",
    pieces: int = 1,
    replicas: int = 1,
    sharded: bool = False,
    after_step: Callable[[int, nn.Module], None] | None = None,
) -> PlainResult:
    """Train one model alone, as anyone would: what a trial of a study must equal bit for bit.

    Ends after ``epochs``, or after ``steps`` optimizer steps, in the middle of an epoch if
    need be; no batch is fetched after the last step. Evaluates every ``eval_every`` steps,
    or after each epoch, and at the end. ``optimizer="host"`` steps on copies in host
    memory, which off a GPU is the same thing. ``on_nonfinite`` overrides the recipe's.
    ``inherits`` says after which steps it goes on from another training's state, with other
    hyperparameters, as a trial of a population does: see ``plain_population``.
    ``weights`` are what gradients are computed with: see ``plain_2bw_loop``. ``pieces`` is how
    many micro-batches of equal rows each batch is cut into. ``replicas`` and ``sharded`` are
    those of ``plain_data_parallel_loop``. ``after_step`` is called with the number of each step,
    from 1, and the model, which it must not change.
    The caller's random streams and thread count are put back.

    Raises:
        SpecError: neither or both of ``steps`` and ``epochs``, or no training data.
        TrialError: a loss is not finite and the recipe does not ignore it.
    """
    _require_one_end(steps, epochs)
    where = torch.device(device)
    if recipe.step is not None and (pieces > 1 or weights != "newest"):
        raise SpecError("a step of one's own takes whole batches and the newest weights.")
    recipe = in_pieces(recipe, pieces)
    ignore_nonfinite = (on_nonfinite or recipe.on_nonfinite) == "ignore"
    losses: list[float] = []
    history: list[dict[str, Any]] = []
    hp = HyperParameters(hp)

    with _borrowed_process(threads, where):
        seed_all(seed)
        model = build_model(recipe, hp).to(where)
        modes, tally = Modes(recipe, model), Tally()
        train, valid = read_data(recipe, hp)
        require_evaluation(recipe, model, valid)
        stepper = make_stepper(recipe, model, hp, optimizer if where.type != "cpu" else "device")
        rounding = rounding_of(recipe, stepper.parameters, seed)
        schedule = build_schedule(recipe, stepper.optimizer, hp)
        versions = versions_of(model, weights)
        take = _gradients(recipe, model, seed, where, replicas, sharded)
        own = OwnStep(recipe, model, stepper.optimizer, hp, modes) if recipe.step else None
        started = clock()

        def go_on_from(source: PlainSource) -> None:
            nonlocal model, modes, hp, own, stepper, rounding, schedule, take
            with _restored_rng(where):  # the trial's own streams and data go on as they were
                seed_all(seed)
                hp, model = source.hp, build_model(recipe, source.hp).to(where)
                modes = Modes(recipe, model)
                copy_model(source.result.model, model)
                take = _gradients(recipe, model, seed, where, replicas, sharded)
                place = optimizer if where.type != "cpu" else "device"
                stepper = make_stepper(recipe, model, source.hp, place)
                theirs = source.result.optimizer, source.result.parameters
                copy_state(*theirs, stepper.optimizer, stepper.parameters)
                rounding = rounding_of(recipe, stepper.parameters, seed)
                schedule = build_schedule(recipe, stepper.optimizer, source.hp)
                own = OwnStep(recipe, model, stepper.optimizer, hp, modes) if own else None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's advice on the order of the two steps
                for _ in range(len(losses) if schedule else 0):
                    schedule.step()
            modes.train()

        def record(epoch: int) -> None:
            if history and history[-1]["step"] == len(losses):
                return
            since = history[-1]["step"] if history else 0
            metrics = {"train_loss": sum(losses[since:]) / len(losses[since:]), **tally.take()}
            metrics |= evaluate(recipe, model, valid, where, hp) if valid is not None else {}
            row = {"step": len(losses), "epoch": epoch, "seconds": clock() - started}
            history.append({**row, "metrics": metrics})
            modes.train()

        def train_group(group: Iterable[Batch]) -> float:
            stepper.zero_grad()
            versions.before_gradients()
            loss = take.backward_group(group, len(losses))
            if not (ignore_nonfinite or math.isfinite(loss)):
                raise TrialError(_nonfinite(loss, len(losses) + 1))
            if recipe.clip_grad_norm:
                take.clip(recipe.clip_grad_norm)
            versions.before_step()
            with rounding.stepping(stepper.parameters, len(losses)):
                take.step(stepper)
            versions.after_step()
            return loss

        def train_alone(group: Iterable[Batch]) -> float:
            """A step of the recipe's own on the one batch of a group."""
            (fetched,) = group
            assert own is not None
            found = own(to_device(fetched, where), len(losses))
            refuse_nonfinite(recipe, found, len(losses) + 1, ignore=ignore_nonfinite)
            tally.add(found.named)
            return found.total

        for epoch in itertools.count(1):
            modes.train()
            steps_before = len(losses)
            for group in chunks(train, recipe.accumulate):
                loss = train_alone(group) if own else train_group(group)
                if schedule:
                    schedule.step()
                losses.append(loss)
                if after_step:
                    with _restored_rng(where):
                        after_step(len(losses), model)
                    modes.train()
                if eval_every and len(losses) % eval_every == 0:
                    record(epoch)
                    if len(losses) in inherits:
                        go_on_from(inherits[len(losses)])
                if len(losses) == steps:
                    break
            if len(losses) == steps_before:
                raise SpecError(
                    f"train data has no batches in epoch {epoch}; it needs one or more."
                )
            done = len(losses) == steps or epoch == epochs
            if done or not eval_every:
                record(epoch)
            if done:
                break
            if not eval_every and len(losses) in inherits:
                go_on_from(inherits[len(losses)])

        rng = capture_rng(where)

    return PlainResult(
        model=model,
        optimizer=stepper.optimizer,
        schedule=schedule,
        parameters=stepper.parameters,
        losses=tuple(losses),
        history=tuple(history),
        metrics=history[-1]["metrics"],
        rng=rng,
        step=len(losses),
    )


def array_loop(
    recipe: Recipe,
    hp: HP,
    seed: int,
    *,
    slot: int,
    width: int,
    kind: PassKind = "eager",
    steps: int | None = None,
    epochs: int | None = None,
    threads: int = 1,
    device: str | torch.device = "cpu",
    eval_every: int | None = None,
    inherits: Mapping[int, PlainSource] = MappingProxyType({}),
) -> PlainResult:
    """The plain loop of a trial that trained in an array: in its slot, with nobody beside it.

    Its bits depend on the slot and the width, and on no neighbour. They are those of
    ``plain_loop`` but for the rounding of other kernels. ``kind`` is how the array's passes run;
    traced ones have the bits of eager ones. ``inherits`` is as there.

    Raises:
        Declined: the trial can be in no array.
    """
    _require_one_end(steps, epochs)
    where = torch.device(device)
    ends: dict[str, Any] = {"steps": steps, "epochs": epochs, "eval_every": eval_every}
    ends["inherits"] = {
        step: (source.hp, functools.partial(_take_over, source.result))
        for step, source in inherits.items()
    }
    with _borrowed_process(threads, where):
        place = SlotPlace(slot, width, kind)
        member, losses, history = train_in_slot(recipe, hp, seed, place, device=where, **ends)
    return PlainResult(
        model=member.module,
        optimizer=member.optimizer,
        schedule=member.schedule,
        parameters=dict(member.module.named_parameters()),
        losses=losses,
        history=tuple({"seconds": 0.0, **row} for row in history),
        metrics=history[-1]["metrics"],
        rng=member.rng,
        step=len(losses),
    )


def _take_over(source: PlainResult, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give a trial that was built anew what another one has learnt."""
    copy_model(source.model, model)
    own = dict(model.named_parameters())
    copy_state(source.optimizer, source.parameters, optimizer, own)


@dataclass(frozen=True, kw_only=True)
class PlainSource:
    """What a training goes on from: ``result`` at the same step, and ``hp`` from there on."""

    result: PlainResult
    hp: HP


@dataclass(frozen=True, kw_only=True)
class PlainTrial:
    """A trial of a population: how it began, and by step from which trial it went on, with what.

    ``inherits`` is what ``TrialResult.inherited`` lists; ``place`` the slot and width of the
    array that it trained in, if it did, and ``kind`` how that array's passes ran.
    """

    hp: HP
    seed: int
    inherits: Mapping[int, tuple[int, HP]] = field(default_factory=dict)
    place: tuple[int, int] | None = None
    kind: PassKind = "eager"


_NOT_IN_ARRAYS = (
    *("optimizer", "on_nonfinite", "clock", "weights", "pieces", "replicas", "sharded"),
    "after_step",
)
"""Options of ``plain_loop`` alone."""


def plain_population(
    recipe: Recipe, trials: Mapping[int, PlainTrial], number: int, **options: Any
) -> PlainResult:
    """Train one trial of a population with plain loops: what a study's must equal bit for bit.

    Each trial that it went on from is trained alone up to that step, in the same way; nothing is
    shared but trainings that are wanted twice. ``options`` are those of ``plain_loop``. Those that
    trained in arrays are trained by ``array_loop``, each in its slot.
    """
    ends = {name: options.pop(name) for name in ("steps", "epochs") if name in options}
    known: dict[tuple[int, int], PlainResult] = {}

    def until(trial: int, step: int) -> PlainResult:
        if (trial, step) not in known:
            known[trial, step] = run(trial, step, steps=step)
        return known[trial, step]

    def run(trial: int, before: float, **end: Any) -> PlainResult:
        asked = trials[trial]
        inherits = {
            step: PlainSource(result=until(source, step), hp=HyperParameters(hp))
            for step, (source, hp) in sorted(asked.inherits.items())
            if step < before
        }
        told = {**options, **end, "inherits": inherits}
        if asked.place is None:
            return plain_loop(recipe, asked.hp, asked.seed, **told)
        told = {name: value for name, value in told.items() if name not in _NOT_IN_ARRAYS}
        slot, width = asked.place
        told["kind"] = asked.kind
        return array_loop(recipe, asked.hp, asked.seed, slot=slot, width=width, **told)

    return run(number, math.inf, **ends)


def plain_2bw_loop(
    recipe: Recipe, hp: HP, seed: int, *, predict: bool = False, **options: Any
) -> PlainResult:
    """The rule of 2BW in one process: W(t+1) = W(t) - step(grad f(W(max(t-1, 0)))).

    What a pipeline with ``schedule="2bw"`` must equal bit for bit. ``predict`` computes the
    gradients at the guess W(t-1) + (W(t-1) - W(t-2)) instead, where there has been a step.
    Evaluated are the newest weights. ``options`` are those of ``plain_loop``.
    """
    weights: WhichWeights = "one step old, guessed" if predict else "one step old"
    return plain_loop(recipe, hp, seed, weights=weights, **options)


def plain_data_parallel_loop(
    recipe: Recipe, hp: HP, seed: int, *, width: int, sharded: bool = False, **options: Any
) -> PlainResult:
    """The rule of data-parallel training in one process, replica after replica.

    What a trial with ``technique=shoal.DataParallel(width)`` must equal bit for bit, and
    ``plain_loop`` to rounding where no row's result depends on other rows, or on random numbers:
    see ``shoal.replicas``. ``sharded`` adds up as FSDP2 does, which is another order where
    gradients are clipped or accumulated. ``options`` are those of ``plain_loop``.
    """
    return plain_loop(recipe, hp, seed, replicas=width, sharded=sharded, **options)


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


def _gradients(
    recipe: Recipe, model: nn.Module, seed: int, device: torch.device, width: int, sharded: bool
) -> _Alone | Replicas:
    if width == 1:
        return _Alone(recipe, model, device)
    return Replicas(recipe, model, seed, device, width=width, sharded=sharded)


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
    for a recipe that evaluates itself.

    Raises:
        TrialError: there is no batch.
    """
    model.eval()
    sums: dict[str, float] = {}
    count = 0
    with _restored_rng(device), torch.no_grad():
        for fetched in valid:
            found = _evaluate_batch(recipe, model, to_device(fetched, device), device, hp)
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value
            count += 1
    if count == 0:
        raise TrialError("validation data has no batches. Return None for it if there is none.")
    return {name: value / count for name, value in sums.items()}


def _evaluate_batch(
    recipe: Recipe, model: nn.Module, batch: Batch, device: torch.device, hp: HP
) -> dict[str, float]:
    if recipe.evaluate is not None:
        return own_evaluation(recipe, model, batch, hp)
    with autocast(recipe, device):
        arguments, keywords = model_inputs(recipe, batch)
        output = model(*arguments, **keywords)
        found = {"valid_loss": float(compute_loss(recipe, output, batch))}
    for name, metric in recipe.metrics.items():
        found[f"valid_{name}"] = float(metric(output, batch))
    return found


def _require_one_end(steps: int | None, epochs: int | None) -> None:
    if (steps is None) == (epochs is None):
        raise SpecError(f"give steps or epochs, one of them; got steps={steps}, epochs={epochs}.")
    if (steps or epochs or 0) < 1:
        raise SpecError(f"train at least one step, got steps={steps}, epochs={epochs}.")


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
def _borrowed_process(threads: int, device: torch.device) -> Iterator[None]:
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
    """State and param groups by parameter name; tensors are shared, on the CPU if they can be."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    state = {
        names[id(parameter)]: {
            key: value.cpu() if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }
        for parameter, entries in optimizer.state.items()
    }
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "groups": groups}
