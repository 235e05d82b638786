"""Who captures an array's passes, or each slot's own, to be launched without their code.

What is captured is told by a backend; how, by whoever knows the device
(``runtime/capture/captures.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.fusion.crew import Steps
from shoal.fusion.graphs.graph import Run
from shoal.fusion.member import Member
from shoal.fusion.passes.loop import lone_pass


class Ready(NamedTuple):
    """A pass over a batch that only has to be launched.

    ``launch`` leaves gradients at the parameters and returns the loss, which the next one may
    overwrite; None where the pass is to run as ever after all, and nothing has happened. Where it
    ``draws``, it does so from torch's generators, which have to be the trial's.
    """

    launch: Callable[[], Tensor | None]
    draws: bool


class LonePass(Protocol):
    """A trial's training pass: by its code, or captured to the same bits."""

    def ready(self, batch: Any) -> Ready | None:
        """The pass over such a batch, if it is captured and trusted."""
        ...

    def backward(self, batch: Any) -> Tensor:
        """The pass as ever, in the trial's random streams; may capture it on the way."""
        ...

    @property
    def why_not(self) -> str:
        """Why some passes are not captured; empty if all are, or may get to be."""
        ...

    def let_go(self) -> None:
        """Hold on to no memory of the device."""
        ...


class Launcher(Protocol):
    """Captures passes, and knows which may run at the same time."""

    def of_graph(self, run: Run, held: int, written: Sequence[int], *, hands_out: bool) -> Run:
        """The operations of an array's pass, launched as one; ``run`` itself where that is none.

        The first ``held`` of its tensors stay where they are, it writes to those that ``written``
        tells of; unless it ``hands_out`` copies, its next call may write to what it returned.
        """
        ...

    def of_steps(self) -> Steps | None:
        """The optimizers' steps of one array, launched as one; None where each is by itself."""
        ...

    def capture(self, member: Member, slot: int) -> LonePass:
        """For a trial that has come into a slot."""
        ...

    def together(self) -> AbstractContextManager[Any]:
        """What is launched inside begins after what came before, and is over at its end."""
        ...

    def lane(self, slot: int, *, beside: bool) -> AbstractContextManager[Any]:
        """Where a slot's pass is launched: ``beside`` what others launch, or after all of it."""
        ...


class ByCode:
    """Passes that are never captured, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def of_graph(self, run: Run, held: int, written: Sequence[int], *, hands_out: bool) -> Run:
        """As it is."""
        return run

    def of_steps(self) -> None:
        """Each by itself."""

    def capture(self, member: Member, slot: int) -> LonePass:
        """Its code."""
        return _Code(member, self._device)

    def together(self) -> AbstractContextManager[Any]:
        """Nothing to wait for."""
        return nullcontext()

    def lane(self, slot: int, *, beside: bool) -> AbstractContextManager[Any]:
        """There is one."""
        return nullcontext()


class _Code:
    """A pass as the plain loop runs it."""

    why_not = ""

    def __init__(self, member: Member, device: torch.device) -> None:
        self._member, self._device = member, device

    def ready(self, batch: Any) -> None:
        """Never."""

    def backward(self, batch: Any) -> Tensor:
        """Forward and backward."""
        _, loss = lone_pass(self._member, batch, self._device)
        accumulate = self._member.recipe.accumulate
        (loss if accumulate == 1 else loss / accumulate).backward()
        return loss

    def let_go(self) -> None:
        """Nothing is kept."""
