"""What a trial's whole model costs: every kind of unit under the tracker, and by the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.core.errors import SpecError
from shoal.core.spec import NO_BYTES, HyperParameters, TrialSpec
from shoal.core.units import Bytes, Seconds, format_seconds
from shoal.frames import line_of, user_line
from shoal.fusion.effects.sideeffects import attributes_of, in_words
from shoal.memory.layout import TensorSpec
from shoal.memory.store import same_bits
from shoal.partition.measure import Timed
from shoal.partition.track import peak_of
from shoal.pystate import Attributes, ambient
from shoal.pystate.ambient import Notes
from shoal.pystate.attributes import in_words as place_in_words
from shoal.recipes.habits import Habits
from shoal.recipes.ownstep import Modes
from shoal.recipes.recipe import (
    Batch,
    Recipe,
    autocast,
    compute_loss,
    evaluate_metrics,
    loss_and_output,
    loss_notes,
    model_inputs,
    rounding_of,
)
from shoal.rng import capture_rng, same_rng
from shoal.runtime.measuring.clipping import refuse_sparse_norm
from shoal.runtime.measuring.counting import fill_gradients, fill_missing_gradients
from shoal.runtime.measuring.settling import changed_attributes
from shoal.runtime.measuring.stepmeasure import OWN_STEP, StepMeasure
from shoal.runtime.placing.binding import Binding, state_specs
from shoal.runtime.validating import FIRST_BATCH, in_validation, note

SLOW_READ_S = 0.01
"""A batch that is read in less is not told of."""


class Built(NamedTuple):
    """A trial's objects, for measuring only."""

    trial: TrialSpec
    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: Iterable[Batch]
    batch: Batch
    valid: Batch | None
    num_batches: int | None
    data: str  # how it is led to a position
    read_s: float  # of a batch
    loader_bytes: Bytes
    modes: Modes
    attributes: Attributes
    globals: Notes
    habits: Habits

    def about_data(self, step_s: float) -> str:
        """How it is led to a position, and that reading is slow beside a step of so long."""
        if self.read_s < max(SLOW_READ_S, 2 * step_s):
            return self.data
        return (
            f"{self.data}; a batch took {format_seconds(self.read_s)} to read, and a step takes "
            f"{format_seconds(step_s)}: devices wait for data (a DataLoader with num_workers "
            "reads ahead)"
        )

    def lost(self) -> tuple[str, ...]:
        """What steps since then changed that no checkpoint can hold, in words."""
        here = ambient.here()
        _, lost = self.attributes.changed()
        _, lost_globals = here.changed(self.globals, here.take())
        return tuple(map(place_in_words, (*lost, *lost_globals)))


class Costs(NamedTuple):
    """Of a model as one shard: the most bytes of each kind of unit, and seconds."""

    forward: Bytes
    backward: Bytes
    step: Bytes
    backward_s: Seconds
    step_s: Seconds
    draws: bool
    draws_evaluating: bool
    states: Mapping[str, Sequence[TensorSpec]]
    notes: tuple[str, ...] = ()
    writes_evaluating: bool = False  # to buffers
    workspace: Bytes = NO_BYTES  # of kernels, at most
    changes: frozenset[str] = frozenset()  # attributes that forwards changed


class WholeModel:
    """A trial's model on ``here``, run and stepped a few times on its first batches.

    ``timed`` runs a unit and says how long it takes; ``clock`` says the time when all that was
    launched is done. What has no room on its device will not run as a whole: its seconds are
    those of a run that is counted, which takes longer.
    """

    def __init__(
        self,
        recipe: Recipe,
        built: Built,
        here: torch.device,
        timed: Timed,
        clock: Callable[[], float],
        room: float = inf,
    ) -> None:
        self._recipe, self._built, self._here = recipe, built, here
        self._timed, self._clock, self._room = timed, clock, room
        self._loss_notes: tuple[str, ...] = ()
        self._draws_evaluating = False

    def costs(self) -> Costs:
        """Bytes, seconds, and what is to be said of them."""
        return self._own_costs() if self._recipe.step else self._costs()

    def _own_costs(self) -> Costs:
        built = self._built
        hp = HyperParameters(built.trial.hp)
        step = StepMeasure(self._recipe, built.model, built.optimizer, hp, built.modes)
        found = step.run(built.batch, built.valid, self._timed)
        return Costs(
            forward=found.evaluation,
            backward=found.step,
            step=Bytes(0),
            backward_s=found.step_s,
            step_s=Seconds(0.0),
            draws=found.draws,
            draws_evaluating=found.draws_evaluating,
            states=found.states,
            notes=(OWN_STEP, *found.notes),
        )

    def _costs(self) -> Costs:
        built, model = self._built, self._built.model
        kept = in_words(attributes_of(model))
        before = capture_rng(self._here)
        scratch: list[Bytes] = []
        forward = peak_of(self._forward, scratch)
        draws = not same_rng(before, capture_rng(self._here))
        changes = changed_attributes(kept, model)
        kept = in_words(attributes_of(model)) if changes else kept
        buffers = [buffer.clone() for buffer in model.buffers()]
        if built.valid is not None:
            with in_validation(FIRST_BATCH):
                forward = max(forward, peak_of(self._evaluate, scratch))
        written = not all(map(same_bits, model.buffers(), buffers))
        del buffers
        begin = self._clock()
        backward = peak_of(self._backward, scratch)
        backward_s = self._clock() - begin
        refuse_sparse_norm(self._recipe, model)
        # A branch that this batch does not take has state too, and what is unfrozen later.
        fill_missing_gradients(model, frozen=built.habits.touches)
        # Makes the state, which is moved then.
        first_step = peak_of(lambda: step_once(self._recipe, built), scratch)
        if self._may_fit(backward):
            backward_s = self._timed(self._backward)
        fill_missing_gradients(model)
        step_begin = self._clock()
        step_once(self._recipe, built)
        step_s = self._clock() - step_begin
        fill_missing_gradients(model)  # where a step drops them
        step_peak = peak_of(lambda: step_once(self._recipe, built), scratch)
        return Costs(
            forward=forward,
            backward=backward,
            step=Bytes(max(step_peak, first_step)),
            backward_s=Seconds(backward_s),
            step_s=Seconds(step_s),
            draws=draws,
            draws_evaluating=self._draws_evaluating,
            writes_evaluating=written,
            states=self._states(),
            workspace=max(scratch),
            notes=self._loss_notes,
            changes=frozenset(changes | changed_attributes(kept, model)),
        )

    def _may_fit(self, backward: Bytes) -> bool:
        """Whether the device may have room for the whole model, which surely needs so much."""
        weights = sum(parameter.nbytes for parameter in self._built.model.parameters())
        held = sum(spec.num_bytes for specs in self._states().values() for spec in specs)
        return weights + held + backward <= self._room

    def _states(self) -> dict[str, list[TensorSpec]]:
        return state_specs(Binding(self._built.model, self._built.optimizer, [[]], self._here))

    def _forward(self) -> None:
        with torch.no_grad(), autocast(self._recipe, self._here):
            self._loss()

    def _evaluate(self) -> None:
        """A validation batch, with its metrics, as the trial will run it."""
        recipe, batch, before = self._recipe, self._built.valid, capture_rng(self._here)
        self._built.model.eval()
        with torch.no_grad(), autocast(recipe, self._here):
            loss, output = loss_and_output(recipe, self._built.model, batch)
        evaluate_metrics(recipe, loss, output, batch)
        self._built.model.train()
        self._draws_evaluating = not same_rng(before, capture_rng(self._here))

    def _backward(self) -> None:
        for parameter in self._built.model.parameters():
            parameter.grad = None
        with autocast(self._recipe, self._here) as entered:
            loss = self._loss()
        self._loss_notes = loss_notes(entered)
        if not loss.requires_grad:
            where = line_of(self._recipe.loss)
            raise SpecError(
                f"the loss{where} does not depend on any parameter that is trained, so there is "
                "nothing to go backward through. Compute it of the model's output as it is, "
                "without detach(), torch.no_grad() or a new tensor, and leave some parameter "
                "unfrozen."
            )
        (loss / self._recipe.accumulate).backward()

    def _loss(self) -> Tensor:
        batch, model = self._built.batch, self._built.model
        args, kwargs = model_inputs(self._recipe, batch)
        try:
            output = model(*args, **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            if not user_line(error):
                error.add_note(_given(self._recipe, model, args, kwargs))
            raise
        try:
            return compute_loss(self._recipe, output, batch)
        except (TypeError, AttributeError) as error:
            got = f"{_in_brief(output)} of the model, and the whole batch ({_in_brief(batch)})"
            note(error, f"Recipe(loss=...) is called as (output, batch). It got {got}.")
            raise


def _given(
    recipe: Recipe, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """What a model's forward got of a batch and by which rule, for who reads that it failed."""
    parts = [_in_brief(one) for one in args]
    parts += [f"{name}={_in_brief(one)}" for name, one in kwargs.items()]
    rule = "as Recipe(inputs=...) says"
    if recipe.inputs is None:
        items = "each item of the batch by its name" if kwargs else "the first item of the batch"
        rule = f"{items}, since there is no Recipe(inputs=...), which says what the forward gets"
    kinds = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    given = {one.dtype for one in (*args, *kwargs.values()) if isinstance(one, Tensor)}
    floats = {dtype for dtype in given if dtype.is_floating_point}
    told = ", ".join(sorted(map(_dtype_name, kinds)))
    weights = f" Its parameters are {told}." if floats and floats != kinds else ""
    return f"The forward got {', '.join(parts)}: {rule}.{weights}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _in_brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_dtype_name(value.dtype)} {list(value.shape)}"
    return type(value).__name__


def draws_in_cudnn(model: nn.Module) -> str:
    """The name of a recurrent module whose dropout cuDNN draws on a GPU; empty where none does.

    It has numbers of its own there, which start anew from torch's generator whenever that is set
    to a state, and that nobody can read: so a forward that runs again has another mask.
    """
    found = (
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1
    )
    return next(found, "") if torch.backends.cudnn.enabled else ""


def step_once(recipe: Recipe, built: Built) -> None:
    """One step of all parameters.

    Raises:
        SpecError: the optimizer wants a closure.
    """
    parameters = dict(built.model.named_parameters())
    try:
        with rounding_of(recipe, parameters, 0).stepping(parameters, 0):
            built.optimizer.step()
    except TypeError as error:
        raise SpecError(
            f"{type(built.optimizer).__name__}.step() cannot be called without arguments "
            f"({error}): it wants a closure that recomputes the loss, because it couples all "
            "parameters in a line search. shoal cannot train with it; use an optimizer that "
            "steps each parameter by its own gradient, such as AdamW or SGD."
        ) from error


def step_draws(recipe: Recipe, built: Built, here: torch.device) -> str:
    """Whether the optimizer's step draws random numbers; why that cannot be spilled."""
    before = capture_rng(here)
    fill_gradients(built.model.parameters(), 0)
    step_once(recipe, built)
    if same_rng(before, capture_rng(here)):
        return ""
    return (
        f"the step of {type(built.optimizer).__name__} draws random numbers, and a shard at a "
        "time it would draw others"
    )
