"""Gradients of a step whose slots train in several passes.

One for each layout of their batches, or for each answer that their code gave.

A pass has all rows, whoever takes part, so that a slot's are the same bits in any company. What
it leaves in rows of others is nobody's gradient. So each pass leaves its gradients by themselves,
and the rows of those that took part are put beside what other passes left, or added to what the
slot has of an earlier batch of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.fusion.declined import Declined


def require_even(there: Mapping[str, Collection[int]], slots: Iterable[int]) -> None:
    """Check that ``slots`` have gradients of all parameters of which any slot has one.

    ``there``: by parameter, the slots that have one.

    Raises:
        Declined: one has none of some parameter, whose optimizer passes over it alone.
    """
    step = set(slots)
    for name, some in there.items():
        if missing := sorted(step.difference(some)):
            raise Declined(
                f"batches of some lengths use {name!r} and others do not: slot {missing[0]} "
                "has no gradient of it in this step, and others have one"
            )


class Gathered:
    """The stacked gradients of one step; ``parameters`` are the blocks [N, ...] that have them."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._blocks = {name: b for name, b in parameters.items() if b.requires_grad}
        self._there: dict[str, set[int]] = {}  # slots that have a gradient of this name

    @property
    def is_used(self) -> bool:
        """Whether some pass left its gradients here."""
        return bool(self._there)

    def take(self, slots: Iterable[int]) -> None:
        """What passes of these have left with the blocks so far."""
        some = set(slots)
        for name, block in self._blocks.items():
            if block.grad is not None and some:
                block.grad = _of_its_own(block.grad)
                self._there[name] = set(some)

    @contextmanager
    def adding(self, slots: Sequence[int]) -> Iterator[None]:
        """A pass inside, of these slots: what it leaves is added to what they have."""
        held = {name: block.grad for name, block in self._blocks.items()}
        for block in self._blocks.values():
            block.grad = None
        try:
            yield
            found = {name: block.grad for name, block in self._blocks.items()}
        except BaseException:
            self._put({}, held)
            raise
        self._put(found, held)
        for name, gradient in found.items():
            if gradient is not None:
                self._add(name, gradient, slots, held[name])

    def require_even(self, slots: Iterable[int]) -> None:
        """Check that those who step have gradients of the same parameters.

        Raises:
            Declined: one has none of some parameter, whose optimizer passes over it alone.
        """
        require_even(self._there, slots)

    def _put(self, found: Mapping[str, Tensor | None], held: Mapping[str, Tensor | None]) -> None:
        for name, block in self._blocks.items():
            block.grad = held[name] if held[name] is not None else found.get(name)

    def _add(self, name: str, gradient: Tensor, slots: Sequence[int], held: Tensor | None) -> None:
        there = self._there.setdefault(name, set())
        if held is None:
            self._blocks[name].grad = _of_its_own(gradient)
        else:
            fresh = [slot for slot in slots if slot not in there]
            again = [slot for slot in slots if slot in there]
            with torch.no_grad():
                for some, goes_in in ((fresh, held.index_copy_), (again, held.index_add_)):
                    if some:
                        rows = torch.tensor(some, device=held.device)
                        goes_in(0, rows, gradient.index_select(0, rows))
        there.update(slots)


def _of_its_own(gradient: Tensor) -> Tensor:
    """In memory that no two elements share, so that rows can be written to."""
    if 0 in gradient.stride():
        return gradient.clone(memory_format=torch.contiguous_format)
    return gradient
