"""What a step of one's own costs, and whether it is one that a trial can be left at and taken up.

As with any model: built, run a few times on real batches, outside the device's budget.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.core.errors import SpecError
from shoal.core.spec import HyperParameters
from shoal.core.units import Bytes, Seconds
from shoal.fusion.passes.fused import is_out_of_memory
from shoal.memory.layout import TensorSpec
from shoal.memory.store import same_bits
from shoal.partition.track import peak_of
from shoal.recipes.modelcopy import deepcopied
from shoal.recipes.optimizers import build_optimizer_of
from shoal.recipes.ownstep import Modes, OwnStep, own_evaluation
from shoal.recipes.recipe import Recipe, autocast, evaluate_metrics, loss_and_output
from shoal.recipes.several import entries_of, members_of
from shoal.recipes.spelled import spelled_by
from shoal.rng import capture_rng, restore_rng, same_rng
from shoal.runtime.placing.binding import Binding, state_specs
from shoal.runtime.validating import FIRST_BATCH, in_validation

OWN_STEP = "it is not cut: a step of one's own is one unit, what runs in it is not known"
"""Why its models are not cut."""

CALLS = 3  # of the step, whose bytes are counted: the first makes the optimizers' state


class Costs(NamedTuple):
    """Of one unit that is everything."""

    evaluation: Bytes
    step: Bytes
    step_s: Seconds
    draws: bool
    draws_evaluating: bool
    states: Mapping[str, Sequence[TensorSpec]]
    notes: tuple[str, ...]


class StepMeasure:
    """One trial with a step of its own, on a batch to train on and perhaps one to evaluate.

    Args:
        timed: Seconds of some work.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        hp: HyperParameters,
        modes: Modes,
    ) -> None:
        self._recipe, self._model, self._optimizer = recipe, model, optimizer
        self._hp, self._modes = hp, modes
        self._here = next(iter(model.parameters())).device
        self._step = OwnStep(recipe, model, optimizer, hp, modes, by_kernel=True)

    def run(self, batch: Any, valid: Any, timed: Callable[[Callable[[], None]], float]) -> Costs:
        """Measure.

        Raises:
            SpecError: a step that trains nothing, or that keeps what no checkpoint would hold.
        """
        notes = self._of_two_steps(batch)
        before = capture_rng(self._here)
        peaks = self._count(batch)
        draws = not same_rng(before, capture_rng(self._here))
        evaluation, draws_evaluating = Bytes(0), False
        if valid is not None:
            before = capture_rng(self._here)
            with in_validation(FIRST_BATCH):
                evaluation = peak_of(lambda: self._evaluate(valid))
            draws_evaluating = not same_rng(before, capture_rng(self._here))
        step_s = timed(lambda: self._call(batch, CALLS))
        self._make_all_state()
        states = state_specs(Binding(self._model, self._optimizer, [[]], self._here))
        self._refuse_loose_state()
        return Costs(
            evaluation=evaluation,
            step=Bytes(max(peaks)),
            step_s=Seconds(step_s),
            draws=draws,
            draws_evaluating=draws_evaluating,
            states=states,
            notes=notes,
        )

    def _call(self, batch: Any, number: int) -> None:
        self._step(batch, number)
        for parameter in self._model.parameters():
            parameter.grad = None

    def _count(self, batch: Any) -> list[Bytes]:
        """The bytes of a few calls.

        Raises:
            SpecError: none of them changed anything, and no code of it says that one would.
        """
        stepped: list[bool] = []

        def note(*_: Any) -> None:
            stepped.append(True)

        members = members_of(self._optimizer)
        handles = [member.register_step_post_hook(note) for member in members]
        may_step = "step" in spelled_by([self._recipe.step]).names  # later, or by chance
        parameters = [] if may_step else list(self._model.parameters())
        before = [p.detach().to("cpu", copy=True) for p in parameters]
        peaks = [peak_of(lambda i=i: self._call(batch, i)) for i in range(CALLS)]  # type: ignore[misc]
        for handle in handles:
            handle.remove()
        now = [p.detach().cpu() for p in parameters]  # of p.data.add_() no version tells
        if not (stepped or may_step) and all(map(same_bits, before, now)):
            raise SpecError(
                f"Recipe(step=...) was called {CALLS} times and trained nothing: it called step() "
                f"of none of its {len(members)} optimizers and changed no parameter. Call "
                "optimizer.step() in it, as a plain loop would."
            )
        return peaks

    def _evaluate(self, valid: Any) -> None:
        """A validation batch, as the trial will run it."""
        recipe = self._recipe
        self._model.eval()
        with torch.no_grad():
            if recipe.evaluate is not None:
                own_evaluation(recipe, self._model, valid, self._hp)
            else:
                with autocast(recipe, self._here):
                    loss, output = loss_and_output(recipe, self._model, valid)
                evaluate_metrics(recipe, loss, output, valid)
        self._modes.train()

    # -- what outlives a step ---------------------------------------------------------

    def _of_two_steps(self, batch: Any) -> tuple[str, ...]:
        """Two steps from one state, on copies: with the gradients of the first one, and without.

        Raises:
            SpecError: the second goes on from them.
        """
        try:
            without = self._two_steps(batch, keeps=False)
            if not _same(without, self._two_steps(batch, keeps=False)):
                return (
                    "two runs of the step from one state end on different bits: it keeps "
                    "something outside its models and optimizers, or its kernels differ; a trial "
                    "that is left and taken up may not equal the plain loop",
                )
            with_gradients = self._two_steps(batch, keeps=True)
        except _CannotCopy as error:
            return (f"whether the step keeps gradients was not looked at: {error}",)
        if not _same(without, with_gradients):
            raise SpecError(
                "Recipe(step=...) goes on from gradients that the step before left, and gradients "
                "do not outlive a step: a trial that is left and taken up has none. Call "
                "zero_grad() before the backward; to sum over several batches, have the data "
                "yield them together."
            )
        return ()

    def _two_steps(self, batch: Any, *, keeps: bool) -> list[Tensor]:
        """Parameters and buffers after two steps of a copy."""
        before = capture_rng(self._here)
        try:
            model = deepcopied(self._model, {})
        except Exception as error:
            raise _CannotCopy(f"the model cannot be copied ({type(error).__name__})") from error
        optimizer = build_optimizer_of(self._recipe, model, self._hp)  # they cannot all be copied
        step = OwnStep(self._recipe, model, optimizer, self._hp, Modes(self._recipe, model))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step(batch, 0)
                step(batch, 1, clears=not keeps)
        except Exception as error:
            if is_out_of_memory(error):
                raise _CannotCopy("there is no room for a copy of the model") from error
            raise
        finally:
            restore_rng(before, self._here)
        return [t.detach() for t in (*model.parameters(), *model.buffers())]

    def _make_all_state(self) -> None:
        """State of parameters that were not stepped yet: an optimizer may step now and then."""
        for member in members_of(self._optimizer):
            held = [p for group in member.param_groups for p in group["params"]]
            missing = [p for p in held if p.requires_grad and not member.state.get(p)]
            for parameter in missing:
                parameter.grad = torch.zeros_like(parameter)
            if missing:
                try:
                    member.step()
                except TypeError:
                    continue  # it wants a closure; what it keeps then is checked as it comes
                finally:
                    for parameter in held:
                        parameter.grad = None

    def _refuse_loose_state(self) -> None:
        """Tensors within lists, as LBFGS has them, have no place of their own."""
        for member in members_of(self._optimizer):
            for entry in entries_of(member):
                for key, value in entry.items():
                    if isinstance(value, list | tuple) and any(
                        isinstance(item, Tensor) for item in value
                    ):
                        raise SpecError(
                            f"{type(member).__name__} keeps {key!r}, a {type(value).__name__} of "
                            "tensors that grows, and a trial's state has a fixed place for each "
                            "tensor. Use an optimizer that keeps tensors of fixed shapes, such as "
                            "AdamW or SGD."
                        )


class _CannotCopy(Exception):
    """Two steps cannot be compared; why."""


def _same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(first, second, strict=True))
