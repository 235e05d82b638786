"""Gradients of several copies added in their order; and the same in one process, by definition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from shoal.recipes.recipe import Batch, Recipe, autocast, compute_loss, model_inputs, to_device
from shoal.recipes.steppers import Stepper
from shoal.replicas import added_to, buffers_of, put_buffers

Grads = Mapping[str, Tensor]


class Sum:
    """What was added so far, by name: ((g0 + g1) + g2).

    It owns the tensors that it is given, and adds in place. A gradient that some copies lack is
    the sum of what the others have.
    """

    def __init__(self) -> None:
        self.grads: dict[str, Tensor] = {}

    def add(self, grads: Grads) -> None:
        """Add what the next copy has."""
        known = [name for name in grads if name in self.grads]
        if known:
            torch._foreach_add_([self.grads[n] for n in known], [grads[n] for n in known])
        self.grads |= {name: grad for name, grad in grads.items() if name not in self.grads}


class InOrder:
    """A step's sum at one of the copies: others' gradients come in their order.

    Args:
        copy: Which one it is.
        mine: Its own gradients, which are changed.
    """

    def __init__(self, copy: int, mine: Grads) -> None:
        self._copy, self._mine = copy, mine
        self._sum, self._is_in = Sum(), False

    def take(self, other: int, grads: Grads) -> None:
        """What another copy has; the one before it has been taken."""
        if other > self._copy:
            self._add_mine()
        self._sum.add(grads)

    def grads(self) -> dict[str, Tensor]:
        """All of them; every other copy's have been taken."""
        self._add_mine()
        return self._sum.grads

    def _add_mine(self) -> None:
        if not self._is_in:
            self._sum.add(self._mine)
            self._is_in = True


class CopiesInTurn:
    """The copies of a pipeline in one process: which gradients are added to which, and in order.

    Micro-batches are computed in the order of the data, so that random numbers are those of the
    plain loop. Each copy has the buffers that its own micro-batches leave; all of them begin a
    step with those of copy 0, which are the model's after it.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, device: torch.device, width: int) -> None:
        self._recipe, self._model, self._device, self._width = recipe, model, device, width

    def backward_group(self, group: Iterable[Batch], step: int) -> float:
        """Give the parameters one step's gradients; returns the mean loss of its batches."""
        sums: list[dict[str, Tensor]] = [{} for _ in range(self._width)]
        buffers = [buffers_of(self._model)] * self._width
        total, count = 0.0, 0
        for micro, fetched in enumerate(group):
            copy = micro % self._width
            put_buffers(self._model, buffers[copy])
            total += self._batch(to_device(fetched, self._device), sums[copy])
            buffers[copy] = buffers_of(self._model)
            count += 1
        put_buffers(self._model, buffers[0])
        added = Sum()
        for grads in sums:
            added.add(grads)
        for name, parameter in self._model.named_parameters():
            parameter.grad = added.grads.get(name)
        return total / count

    def step(self, stepper: Stepper) -> None:
        """Step the optimizer."""
        stepper.step()

    def clip(self, limit: float) -> None:
        """Clip by the global norm of the sums."""
        nn.utils.clip_grad_norm_(self._model.parameters(), limit)

    def _batch(self, batch: Batch, sums: dict[str, Tensor]) -> float:
        """A micro-batch's gradients are added to its copy's; its loss."""
        recipe = self._recipe
        with added_to(sums, self._model):
            with autocast(recipe, self._device):
                arguments, keywords = model_inputs(recipe, batch)
                loss = compute_loss(recipe, self._model(*arguments, **keywords), batch)
            (loss / recipe.accumulate).backward()
        return float(loss.detach())
