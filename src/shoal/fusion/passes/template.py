"""One copy of the model's code that runs for all slots.

It is a copy of the first slot's module whose settings are those of all slots (``blend.py``).
Its parameters and buffers are put in for a pass. A part that cannot run for all slots at once
is *looped*: there each slot's own module does its part, one after another. So may the recipe's
loss be: one that matches predictions to targets in Python, or mines its batch for hard examples.
And so may its inputs, before the pass (``feeding.py``): they mix a batch's rows, or mask them.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode_temporarily

from shoal.core.arraykeys import INPUTS, LOSS
from shoal.fusion.declined import Declined, Disagreement
from shoal.fusion.member import Member
from shoal.fusion.passes.outputs import put_together, taken_apart
from shoal.fusion.passes.slots import Slots
from shoal.fusion.passes.streams import DRAWN, nothing_drawn
from shoal.fusion.passes.switching import untouched
from shoal.fusion.rows.blend import blend, blend_settings
from shoal.fusion.rows.installed import installed, places_of
from shoal.fusion.rows.keptparts import named_parts
from shoal.fusion.rows.sealed import sealed
from shoal.fusion.rows.stacked import Stacked, owners
from shoal.recipes.modelcopy import deepcopied
from shoal.recipes.recipe import Recipe, compute_loss, model_inputs
from shoal.rng import host_words

TOLD = {LOSS: "the loss", INPUTS: "what makes the model's inputs"}
OF_FRAME = {compute_loss.__code__: LOSS, model_inputs.__code__: INPUTS}


def told_of(part: str) -> str:
    """A part's name for a reader."""
    return TOLD.get(part, repr(part))


class Template:
    """The code of ``members``, and which parts of it are looped (by name).

    ``draws_python``: a looped loss has each slot's own streams of Python's and NumPy's random
    numbers. ``is_open``: inputs are looped of which an operation is anyway, so that what follows
    them may become a graph.

    Raises:
        Declined: the trials differ in what cannot differ inside an array.
    """

    def __init__(
        self,
        members: Sequence[Member],
        looped: Sequence[str] = (),
        *,
        draws_python: bool = False,
        is_open: bool = False,
    ) -> None:
        self._draws_python, self._is_open = draws_python, is_open
        self.modules = [member.module for member in members]
        first = self.modules[0]
        kept = {id(t): t for t in (*first.parameters(), *first.buffers())}
        self.module = _blended(_copied(first, kept), self.modules)
        self._recipes = [member.recipe for member in members]
        self.recipe = self._watched(_blended_recipe(self._recipes))
        self._owner_of = owners(first)
        self._places = places_of(self.module, self._owner_of)
        self._pass: tuple[Slots, Stacked] | None = None
        self.looped: list[str] = []
        for path in looped:
            self.loop(path)

    def train(self, training: bool) -> None:
        """Put the code into training or evaluation mode, as the members are."""
        if self.module.training != training:
            with untouched(self.module):  # a member has its tensors, and has been put into it
                self.module.train(training)

    def loop(self, path: str) -> None:
        """Run this part slot by slot from now on.

        Raises:
            Declined: it is the whole model, which then is better trained unfused.
        """
        if not path:
            raise Declined("no part of the model can run for all slots at once.")
        if path == LOSS:
            self.recipe = dataclasses.replace(self.recipe, loss=self._loss_of_each)
        elif path != INPUTS:
            runners = [self._runner(path, slot) for slot in range(len(self.modules))]
            self.module.get_submodule(path).forward = functools.partial(self._run_each, runners)
        self.looped.append(path)

    def _run_each(self, runners: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
        assert self._pass is not None, "a looped part runs within a pass"
        with _pop_mode_temporarily():
            return self._pass[0].each_its_own(runners, args, kwargs)

    def _loss_of_each(self, output: Any, batch: Any) -> Tensor:
        tensors, form = taken_apart((output, batch))

        def runner(slot: int) -> Callable[..., Tensor]:
            def loss(*rows: Tensor) -> Tensor:
                assert self._pass is not None
                mine = put_together(form, slot, rows.__getitem__)
                with self._pass[0].streams.by_itself(slot, self._draws_python):
                    return compute_loss(self._recipes[slot], *mine)

            return loss

        losses: Tensor = self._run_each(list(map(runner, range(len(self.modules)))), *tensors)
        return losses

    def _watched(self, recipe: Recipe) -> Recipe:
        """Whose inputs and loss do not draw of all slots at once what each has its own of."""

        def inputs(batch: Any) -> Any:
            assert self._pass is not None
            assert recipe.inputs is not None
            slots = self._pass[0]
            before = slots.num_looped
            with nothing_drawn():
                found = recipe.inputs(batch)
            if self._is_open and slots.num_looped > before:
                raise Disagreement("operations of it do anyway")
            return found

        def loss(output: Any, batch: Any) -> Any:
            assert recipe.loss is not None
            with nothing_drawn():
                return recipe.loss(output, batch)

        watched: dict[str, Any] = {"inputs": inputs} if recipe.inputs is not None else {}
        if recipe.loss is not None:
            watched["loss"] = loss
        return dataclasses.replace(recipe, **watched)

    def _runner(self, path: str, slot: int) -> Callable[..., Any]:
        part = self.modules[slot].get_submodule(path)
        places = places_of(part, self._owner_of, path, named_parts(self.modules[slot]))

        def run(*args: Any, **kwargs: Any) -> Any:
            assert self._pass is not None
            stacked = self._pass[1]
            blocks = {**stacked.parameters, **stacked.buffers}
            tensors = {owner: blocks[owner][slot] for owner in places.owners}
            with installed(places, tensors) as replaced:
                output = part(*args, **kwargs)
            for name, value in replaced.items():
                stacked.buffers[name][slot].copy_(value.detach())
            return output

        return run

    @contextmanager
    def running(
        self, slots: Slots, stacked: Stacked, tensors: Mapping[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """The module with ``tensors`` in place; yields the buffers that it replaces."""
        self._pass = (slots, stacked)
        try:
            with installed(self._places, tensors) as replaced:
                before = host_words()
                yield replaced
                if host_words() != before:
                    raise Declined(f"the model's forward {DRAWN}")
        finally:
            self._pass = None

    def innermost(self, trace: types.TracebackType | None) -> str | None:
        """The name of the smallest part whose code an error went through."""
        names = {id(child): name for name, child in self.module.named_modules()}
        found = None
        while trace is not None:
            owner = trace.tb_frame.f_locals.get("self")
            if (part := OF_FRAME.get(trace.tb_frame.f_code)) is not None:
                found = part
            elif isinstance(owner, nn.Module) and id(owner) in names:
                found = names[id(owner)]
            trace = trace.tb_next
        return found


def _copied(module: nn.Module, kept: Mapping[int, Tensor]) -> nn.Module:
    try:
        return deepcopied(module, dict(kept))
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise Declined(f"the model cannot be copied: {error}") from error


def _blended(template: nn.Module, modules: Sequence[nn.Module]) -> nn.Module:
    try:
        return blend_settings(template, modules, "the model")
    except RecursionError:
        raise Declined("the model's settings refer to each other in a circle.") from None


def _blended_recipe(recipes: Sequence[Recipe]) -> Recipe:
    first = recipes[0]
    if all(recipe is first for recipe in recipes):
        return sealed(first)
    both = dataclasses.replace(
        first,
        loss=blend([recipe.loss for recipe in recipes], "the recipe's loss"),
        inputs=blend([recipe.inputs for recipe in recipes], "the recipe's inputs"),
    )
    return sealed(both)
