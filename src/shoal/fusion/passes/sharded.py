"""Parts of a model's code for all slots, one after another: a pass in shards.

What runs is a copy of the model as in any pass (``fused.py``): the template, within a level and
under a mode, its parameters and buffers put in. Which of its layers run, and with which tensors of
earlier ones, is the caller's: nothing slotted outlives a part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from shoal.fusion.batches import combined
from shoal.fusion.crew import Crew, Undo
from shoal.fusion.declined import Declined
from shoal.fusion.passes.fused import (
    Learnt,
    StackedBackend,
    is_out_of_memory,
    of_backward,
    shares_memory,
)
from shoal.fusion.passes.mode import SlotMode
from shoal.fusion.passes.slots import Slots
from shoal.fusion.passes.template import Template
from shoal.fusion.rows.level import Level, entered
from shoal.recipes.recipe import autocast

Result = TypeVar("Result")


class Inside(NamedTuple):
    """What a part of the code finds: the level, the template, and the batch of all slots."""

    level: Level
    template: Template
    batch: Any


class Packed(NamedTuple):
    """A tensor as it is between two parts: what is within, and its dimension of slots.

    None: it is one tensor for all slots.
    """

    tensor: Tensor
    dim: int | None

    def within(self, level: Level) -> Tensor:
        """As the model's code sees it."""
        return self.tensor if self.dim is None else level.slotted(self.tensor, self.dim)

    def row(self, slot: int) -> Tensor:
        """A slot's own."""
        return self.tensor if self.dim is None else self.tensor.select(self.dim, slot)

    def with_row(self, slot: int, other: int) -> Packed:
        """With one slot's values in the place of another's."""
        if self.dim is None:
            return self
        changed = self.tensor.detach().clone()
        changed.select(self.dim, slot).copy_(self.tensor.select(self.dim, other))
        return Packed(changed, self.dim)


class ShardBackend(StackedBackend):
    """Runs parts of the code; loops what cannot run for all slots, as a whole pass does.

    But for inputs, which each part has made anew.
    """

    def _made(self, crew: Crew, known: Learnt) -> Template:
        return Template(crew.members, known.looped, draws_python=known.draws_python)

    def part(
        self,
        crew: Crew,
        batches: Sequence[Any],
        active: Sequence[bool],
        changing: Sequence[str],
        work: Callable[[Inside], Mapping[Any, Tensor]],
    ) -> dict[Any, Packed]:
        """What ``work`` makes for all slots. ``batches``: one for every slot.

        Buffers in ``changing`` are as before if it raises, and so are random streams.

        Raises:
            Declined: it cannot run for all slots.
        """
        undo = Undo({name: crew.stacked.buffers[name].clone() for name in changing})
        with self._forgetting(crew):
            while True:
                self._current(crew).train(crew.members[0].module.training)
                crew.streams.begin(active)
                try:
                    return self._made_within(crew, batches, active, work)
                except (Exception, SystemExit) as error:
                    crew.streams.undo()
                    undo.put_back(crew.stacked)
                    if is_out_of_memory(error):
                        raise
                    self._learn(error, crew)

    def _made_within(
        self,
        crew: Crew,
        batches: Sequence[Any],
        active: Sequence[bool],
        work: Callable[[Inside], Mapping[Any, Tensor]],
    ) -> dict[Any, Packed]:
        template = self._current(crew)
        blocks = {**crew.stacked.given, **crew.stacked.buffers}
        with entered(crew.width) as level:
            slots = Slots(level, crew.streams, active)
            batch = combined(batches, level.slotted)
            slots.are_rows = functools.partial(shares_memory, blocks.values())
            tensors = self._within(crew, level, blocks)
            with (
                template.running(slots, crew.stacked, tensors) as replaced,
                SlotMode(slots, own_factories=self._known_of(crew).own_factories),
                autocast(template.recipe, crew.device),
            ):
                made = work(Inside(level, template, batch))
            for name, value in replaced.items():
                blocks[name].copy_(level.stacked(value.detach()))
            return {key: Packed(*level.open(tensor)) for key, tensor in made.items()}


def backward(roots: Sequence[Any], gradients: Sequence[Tensor]) -> None:
    """Autograd's backward, of a pass that has left its level.

    Raises:
        Declined: it fails, as where the model's code runs again in it.
    """
    try:
        torch.autograd.backward(list(roots), list(gradients))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise Declined(of_backward(error)) from error
