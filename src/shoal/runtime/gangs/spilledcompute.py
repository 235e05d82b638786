"""What the actions of a spilled stage do: units of its shards, and what stages tell each other.

As ``compute`` does the units of a trial on one device, with the random numbers of a pipeline
(``pipeline.foretell``): every micro-batch has the state where its next first forward begins, and
takes it along from shard to shard and from stage to stage.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shoal.core.errors import TrialError
from shoal.pipeline.foretell import Foretelling
from shoal.pipeline.links import Links
from shoal.pipeline.packing import pack_rng, unpack_rng
from shoal.pipeline.schedule import Pipeline
from shoal.program.ir import Action, Op, Part
from shoal.program.needs import message_kind
from shoal.recipes.recipe import Batch
from shoal.rng import RngState, capture_rng, restore_rng
from shoal.runtime.compute import Compute
from shoal.runtime.gangs.pipelined import PipelineSession
from shoal.runtime.placing.placed import Placed
from shoal.runtime.session import Session
from shoal.runtime.streams import Stream, drawing_nothing
from shoal.runtime.task import Task
from shoal.runtime.units import ChainUnits, Micro


class SpilledCompute(Compute):
    """The units and messages of one spilled stage.

    Args:
        index: The stage.
        links: To the others.
        on_loss: Told the losses of each step's micro-batches, on the last stage.
    """

    def __init__(
        self,
        session: Session,
        host: list[Placed],
        *,
        index: int,
        links: Links,
        on_loss: Callable[[Sequence[float]], None],
    ) -> None:
        assert isinstance(session, PipelineSession)
        super().__init__(session, host)
        self._staged, self._links, self._on_loss = session, links, on_loss
        self._first, stop = session.spans[index]
        self._here, self._stop = range(self._first, stop), session.job.shards[stop - 1].layers[1]
        self._starts = [session.job.shards[shard].layers[0] for shard in self._here]
        assert isinstance(session.units, ChainUnits)
        self._units = session.units
        self._pipeline: Pipeline | None = None
        self._foretelling: Foretelling | None = None
        self._losses: list[float] = []
        self._streams: dict[int, Stream] = {}  # of micro-batches
        self._next: RngState | None = None  # where the next micro-batch begins, at the first stage
        self._newest: tuple[Batch, RngState] | None = None  # it, and the state after shard 0

    def begin_step(self, pipeline: Pipeline, foretelling: Foretelling | None) -> None:
        """Go on with another step; the one before is through."""
        self._pipeline, self._foretelling = pipeline, foretelling
        self._losses, self._next, self._newest = [], None, None
        self._streams.clear()

    @property
    def end_rng(self) -> RngState:
        """The random state after the last forward that the first stage knows of."""
        return self._next or capture_rng(self._staged.device)

    def end_step(self) -> None:
        """A clean slate for the next step."""
        super().end_step()
        self._norms.clear()

    @property
    def _draws(self) -> bool:
        return self._pipeline is not None and self._pipeline.draws

    # -- units ----------------------------------------------------------------------------

    def begin(self, task: Task, action: Action) -> None:
        """At the first stage, have the micro-batch of an F; at others it came in a message."""
        number = action.micro
        if number is None or number in task.micros:
            return
        if task.kind == "evaluation":
            batch = task.batches.pop(number)
        else:
            self._foretell(number - 1)
            batch = self._staged.fetch_micro()
            if self._draws:
                self._streams[number] = Stream(capture_rng(self._staged.device))
        self._note_size(batch, evaluates=task.kind == "evaluation")
        task.micros[number] = self._units.begin(batch)

    def _foretell(self, before: int) -> None:
        """Move on to where a micro-batch begins, before all shards have come there."""
        if self._foretelling is not None and self._newest is not None:
            batch, after_first = self._newest
            restore_rng(after_first, self._staged.device)
            self._foretelling.draw_on(batch)
            self._next = self._streams[before].foretold = capture_rng(self._staged.device)
        if self._next is not None:
            restore_rng(self._next, self._staged.device)

    def _forward(self, task: Task, action: Action) -> None:
        number = action.micro or 0
        micro = task.micros[number]
        with self._drawing(task, number):
            super()._forward(task, action)
        if action.shard == 0 and self._draws and task.kind != "evaluation":
            self._newest = (micro.batch, self._streams[number].state)

    def _backward(self, task: Task, action: Action) -> None:
        number = action.micro or 0
        micro = task.micros[number]
        if action.shard + 1 < self._units.num_shards:
            super()._backward(task, action)
        else:
            with self._drawing(task, number):
                super()._backward(task, action)
            self._note_loss(number)
        if action.shard == self._first:
            micro.wires = {}
            micro.batch = None

    @contextmanager
    def _drawing(self, task: Task, number: int) -> Iterator[None]:
        """A first forward, with the random numbers of the plain loop.

        Raises:
            TrialError: it draws some, and may not.
        """
        trains = task.kind != "evaluation"
        stream = self._streams.get(number) if trains else None
        error = TrialError(_DREW if trains else _DREW_EVALUATING)
        device = self._staged.device
        with stream.going_on(device) if stream else drawing_nothing(device, error):
            yield

    def _note_loss(self, number: int) -> None:
        """The mean over a step, as the plain loop takes it."""
        assert self._pipeline is not None
        if number + 1 < self._pipeline.num_micros:
            return
        self._staged.require_finite()
        losses = self._staged.losses.values()
        self._staged.begin_losses()
        mean = functools.reduce(operator.add, losses, 0.0) / len(losses)  # sum() compensates
        if not (math.isfinite(mean) or self._staged.recipe.on_nonfinite == "ignore"):
            raise TrialError(
                f"the loss of step {self._staged.step + 1} is {mean}. Lower the learning rate or "
                "clip the gradients, or train on with Recipe(on_nonfinite='ignore')."
            )
        self._on_loss(losses)

    # -- messages -------------------------------------------------------------------------

    def has(self, action: Action) -> bool:
        """Whether what a RECV takes is here."""
        return self._links.has(action.peer or 0, message_kind(action))

    def pass_on(self, task: Task, action: Action) -> None:
        """Send what a SEND names, or take what a RECV does."""
        line = (action.peer or 0, message_kind(action))
        if action.op is Op.SEND:
            self._links.send(*line, self._given(task, action), widely=True)
        else:
            self._take(task, action, self._links.take(*line))

    def _take(self, task: Task, action: Action, tree: Any) -> None:
        number, parts = action.micro or 0, action.parts
        if Part.NORM in parts and action.shard:
            self._norms.update(tree)
        elif Part.NORM in parts:
            self._clip = tree
        elif Part.RNG in parts:
            self._take_rng(number, unpack_rng(tree))
        elif Part.GRAD in parts:
            grads, tied = tree
            task.micros[number].grads, task.micros[number].tied = dict(grads), dict(tied)
        elif Part.PARAM not in parts:  # of these it is told only that the host has them
            task.micros[number] = self._arrived(number, tree)

    def _given(self, task: Task, action: Action) -> Any:
        number, parts = action.micro or 0, action.parts
        if Part.NORM in parts:
            return self._clip if self._first == 0 else self._norms_on(action.shard)
        if Part.PARAM in parts:
            return None
        if Part.RNG in parts:
            return pack_rng(self._streams[number].state)
        if Part.GRAD in parts:
            micro = task.micros.pop(number)
            return micro.grads, micro.tied
        return self._boundary(task, number)

    def _norms_on(self, shard: int) -> dict[str, Any]:
        return {
            name: self._norms[name] for name in self._staged.owned[shard] if name in self._norms
        }

    def _take_rng(self, number: int, state: RngState) -> None:
        """The state after a micro-batch: to go on with, or to compare.

        Raises:
            TrialError: it is not what was foretold.
        """
        stream = self._streams[number]
        stream.state = state
        if stream.foretold is None:
            self._next, self._newest = state, None
        stream.require_foretold("technique='spilled'")

    def _arrived(self, number: int, tree: Any) -> Micro:
        """A micro-batch as the stage before left it."""
        batch, parts, touched, wires, rng = tree
        self._note_size(batch)
        micro = self._units.begin(batch)
        micro.context.sheet = replace(self._units.chain.skeleton.blank_sheet(), parts=parts)
        micro.context.touched |= touched
        micro.wires = dict(wires)
        if rng is not None:
            self._streams[number] = Stream(unpack_rng(rng))
        return micro

    def _boundary(self, task: Task, number: int) -> Any:
        """What the next stage needs; what no backward here reads is not kept."""
        micro, chain, trains = task.micros[number], self._units.chain, task.kind != "evaluation"
        live = chain.live_wires(self._stop, micro.context)
        leaving = {wire: micro.wires[wire] for wire in live}
        if trains:
            starts = self._starts if self._first else self._starts[1:]
            again = {w for layer in starts for w in chain.live_wires(layer, micro.context)}
            micro.wires = {wire: t for wire, t in micro.wires.items() if wire in again}
        else:
            del task.micros[number]
        stream = self._streams.get(number) if trains else None
        sheet = micro.context.sheet
        packed = None if stream is None else pack_rng(stream.state)
        return micro.batch, sheet.parts, micro.context.touched, leaving, packed


_DREW = (
    "the model drew random numbers, which it did not on its first batch, so its stages would draw "
    "them in another order than the plain loop. Train it with technique='spilled'."
)
_DREW_EVALUATING = (
    "the model draws random numbers while it is evaluated, which stages would draw in another "
    "order than one device. Train it with technique='spilled'."
)
