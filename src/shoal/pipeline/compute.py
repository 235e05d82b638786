"""What the actions of one stage do with the user's model: its share of the arithmetic.

When an action runs is the list's business (``stage``). A micro-batch in flight is a ``Flight``:
what came in with its boundary, and what its forward left for its backward. After
that, or its first half, only what the stage before waits for is left, and the other half.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from shoal.core.errors import TrialError
from shoal.device.losses import Losses, readback_of
from shoal.partition.chain import Chain, Micro
from shoal.partition.halves import Half
from shoal.partition.preserve import read_buffers, write_buffers
from shoal.partition.units import (
    BackwardResult,
    Held,
    run_backward,
    run_forward,
    run_held_backward,
    run_held_forward,
    run_held_inputs,
    run_last_inputs,
)
from shoal.pipeline.foretell import Foretelling
from shoal.pipeline.packing import pack_rng, unpack_rng
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.weights import Weights
from shoal.program.ir import Action, Op, Part
from shoal.recipes.bound import clip_limit
from shoal.recipes.recipe import Batch
from shoal.recipes.subsets import clip_factor
from shoal.rng import RngState, capture_rng, restore_rng, same_rng


@dataclass(slots=True)
class Flight:
    """One micro-batch at one stage, from its boundary to its last unit."""

    micro: Micro
    wires: dict[Any, Tensor] = field(default_factory=dict)  # that came in
    leaving: dict[Any, Tensor] = field(default_factory=dict)  # for the next stage
    held: Held | None = None  # the forward, if it is not run again
    rng: RngState | None = None  # before the forward, if it is
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    grads: Mapping[Any, Tensor] = field(default_factory=dict)  # from the next stage
    tied: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one stage is of a chain: layers [start, stop), and whose parameters it reads.

    ``borrowed`` are names by the stage that owns them, ``lent`` by the stage that borrows.
    ``buffers`` are those that its forwards change.
    """

    stage: int
    start: int
    stop: int
    owned: tuple[str, ...]
    borrowed: Mapping[int, tuple[str, ...]]
    lent: Mapping[int, tuple[str, ...]]
    buffers: tuple[str, ...]


class StageCompute:
    """Runs the actions of one stage.

    Args:
        pipeline: What all stages run.
        chain: The model's; parameters of other stages may be gone.
        share: This stage's part of it.
        weights: Its versions.
        fetch: The next micro-batch; of the first stage only.
        foretelling: What later stages draw; of the first stage, where it can be foretold.
        after_step: Told when a step is done: the schedule of the learning rate.
        on_loss: Told the losses of each step's micro-batches; of the last stage only.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        chain: Chain,
        share: Share,
        weights: Weights,
        *,
        fetch: Callable[[int], Batch],
        after_step: Callable[[], None],
        foretelling: Foretelling | None = None,
        on_loss: Callable[[Sequence[float]], None] = lambda losses: None,
    ) -> None:
        self._pipeline, self._chain, self._share = pipeline, chain, share
        self._unwritten = chain.unwritten(share.start, share.stop)
        self._device = chain.device
        self._steps_before, self._on_loss = 0, on_loss
        self._weights, self._fetch, self._after_step = weights, fetch, after_step
        self._foretelling = foretelling
        self._foretold: dict[int, RngState] = {}
        self._newest: tuple[int, Batch] | None = None  # which the first stage took last
        self._is_last = share.stop == chain.num_layers
        self._flights: dict[int, Flight] = {}
        self._backs: dict[int, BackwardResult] = {}  # for the stage before
        self._halves: dict[int, Half] = {}  # of backwards, still to be run
        self._rng: RngState | None = None  # where this stage's next forward begins, if it draws
        self._norms: dict[int, dict[str, Tensor]] = {}
        self._factors: dict[int, Tensor | None] = {}
        self._readback = readback_of(chain.device, chain.recipe.accumulate)
        self._losses = Losses(self._readback)
        self.losses: list[list[float]] = []  # of each step's micro-batches
        self.most_in_flight = 0
        self._works = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward_of_inputs,
            Op.W: self._backward_of_weights,
            Op.STEP: self._step,
            Op.SYNC: self._sync,
        }

    def begin(self, pipeline: Pipeline, steps_before: int) -> None:
        """Go on with another program, after so many steps; the one before is through."""
        assert not self._flights.keys() | self._backs.keys() | self._halves.keys()
        self._pipeline, self._steps_before = pipeline, steps_before
        self._rng, self._newest = None, None
        self._foretold.clear()
        self.losses = []

    def run(self, action: Action) -> None:
        """Compute one action."""
        self._works[action.op](action)

    # -- messages -------------------------------------------------------------------------

    def take(self, action: Action, tree: Any) -> None:
        """What a RECV brought."""
        micro, parts = action.micro or 0, action.parts
        if Part.NORM in parts:
            self._take_norm(action, tree)
        elif Part.PARAM in parts:
            self._weights.borrow(action.version, tree)
        elif Part.RNG in parts:
            self._take_rng(micro, unpack_rng(tree))
        elif Part.GRAD in parts:
            self._flights[micro].grads, self._flights[micro].tied = tree
        else:
            self._flights[micro] = self._arrived(tree)

    def give(self, action: Action) -> Any:
        """What a SEND is to bring."""
        micro, parts = action.micro or 0, action.parts
        if Part.NORM in parts:
            step = action.version
            mine = action.shard != 0 or self._share.stage != 0
            return self._weights.norms(step) if mine else self._factors[step]
        if Part.PARAM in parts:
            return self._weights.lend(action.version, self._share.lent[action.shard])
        if Part.RNG in parts:
            assert self._rng is not None
            return pack_rng(self._rng)
        return self._carry(micro) if Part.GRAD in parts else self._boundary(micro)

    def _take_rng(self, micro: int, state: RngState) -> None:
        """The state after a micro-batch: to go on with, or to compare.

        Raises:
            TrialError: it is not what was foretold.
        """
        foretold = self._foretold.pop(micro, None)
        if foretold is None:
            self._rng, self._newest = state, None
        elif not same_rng(foretold, state):
            raise TrialError(
                f"the model drew other random numbers for micro-batch {micro} than for earlier "
                "ones of its form: its draws depend on what it computes, and cannot be foretold. "
                "Use foretell=False where its stages may wait for each other, or train it spilled."
            )

    def _foretell(self) -> None:
        """Move on to where the next micro-batch begins, before later stages have come there."""
        if self._foretelling is None or self._newest is None or self._rng is None:
            return
        number, batch = self._newest
        restore_rng(self._rng, self._device)
        self._foretelling.draw_on(batch)
        self._rng = self._foretold[number] = capture_rng(self._device)

    def _take_norm(self, action: Action, tree: Any) -> None:
        if self._share.stage == 0:
            self._norms.setdefault(action.version, {}).update(tree)
        else:
            self._factors[action.version] = tree

    def _arrived(self, tree: Any) -> Flight:
        """A micro-batch as the stage before left it."""
        batch, parts, touched, wires, rng = tree
        micro = self._chain.begin(batch)
        micro.sheet = replace(self._chain.skeleton.blank_sheet(), parts=parts)
        micro.touched |= touched
        if rng is not None:
            self._rng = unpack_rng(rng)
        return Flight(micro, wires=wires)

    def _boundary(self, number: int) -> Any:
        flight = self._flights[number]
        leaving, flight.leaving = flight.leaving, {}
        micro = flight.micro
        assert micro.sheet is not None
        rng = pack_rng(self._rng) if self._rng is not None else None
        return (micro.batch, micro.sheet.parts, micro.touched, leaving, rng)

    def _carry(self, number: int) -> Any:
        result = self._backs.pop(number)
        return result.grads, result.tied

    # -- units ----------------------------------------------------------------------------

    def _begin(self, action: Action) -> Flight:
        """The micro-batch in flight, with its version bound; the first stage fetches it."""
        number = action.micro or 0
        self._weights.bind(action.version)
        if number not in self._flights:
            self._foretell()
            if self._rng is not None:
                restore_rng(self._rng, self._device)
            batch = self._fetch(self._pipeline.group_of(number))
            self._flights[number] = Flight(self._chain.begin(batch))
            if self._pipeline.draws:
                self._rng, self._newest = capture_rng(self._device), (number, batch)
        here = self._flights.keys() | self._backs.keys() | self._halves.keys()
        self.most_in_flight = max(self.most_in_flight, len(here))
        return self._flights[number]

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """A first forward, with the random numbers of the plain loop.

        Raises:
            TrialError: it draws some, and the pilot did not.
        """
        if self._rng is not None:
            restore_rng(self._rng, self._device)
        before = capture_rng(self._device)
        yield
        after = capture_rng(self._device)
        if self._pipeline.draws:
            self._rng = after
        elif not same_rng(before, after):
            raise TrialError(
                "the model drew random numbers, which it did not on its first batch, so its "
                "stages would draw them in another order than the plain loop. Train it with "
                "draws=True."
            )

    def _forward(self, action: Action) -> None:
        flight = self._begin(action)
        share, chain = self._share, self._chain
        if Part.SAVED not in action.parts:
            flight.rng = self._rng or capture_rng(self._device)
            flight.buffers = read_buffers(chain.model, share.buffers)
        with self._drawing():
            if Part.SAVED in action.parts:
                flight.held = run_held_forward(
                    chain, flight.micro, share.start, share.stop, flight.wires
                )
                made = dict(flight.held.made)
                flight.held.made.clear()
            else:
                with self._unwritten.required():
                    made = run_forward(chain, flight.micro, share.start, share.stop, flight.wires)
        alive = flight.wires | made
        live = chain.live_wires(share.stop, flight.micro)
        flight.leaving = {wire: alive[wire] for wire in live}
        if flight.held is not None:
            flight.wires = {}  # the graph has what it needs of them

    def _backward(self, action: Action) -> None:
        self._weights.bind(action.version)
        if self._is_last:
            self._run_last(action, self._whole_last)
        elif Part.SAVED in action.parts:
            flight = self._flights[action.micro or 0]
            assert flight.held is not None
            self._end(
                action, run_held_backward(*self._where(flight), flight.held, **_given(flight))
            )
        else:
            with self._again(action) as flight:
                result = run_backward(*self._where(flight), flight.wires, **_given(flight))
            self._end(action, result)
        self._end_of_group(action)

    def _backward_of_inputs(self, action: Action) -> None:
        self._weights.bind(action.version)
        if self._is_last:
            self._run_last(action, self._half_last)
            return
        flight = self._flights[action.micro or 0]
        if flight.held is None:
            with self._again(action):
                flight.held = run_held_forward(*self._where(flight), flight.wires)
        result, half = run_held_inputs(*self._where(flight), flight.held, **_given(flight))
        self._end(action, result, half)

    def _backward_of_weights(self, action: Action) -> None:
        number = action.micro or 0
        self._weights.bind(action.version)
        half = self._halves.pop(number, None)
        if half is not None:
            with self._chain.backward_watched(self._share.start, self._share.stop):
                half.run()
        self._end_of_group(action)

    def _where(self, flight: Flight) -> tuple[Chain, Micro, int, int]:
        return self._chain, flight.micro, self._share.start, self._share.stop

    def _whole_last(self, flight: Flight) -> tuple[BackwardResult, Half]:
        accumulate = self._chain.recipe.accumulate
        result = run_backward(*self._where(flight), flight.wires, accumulate=accumulate)
        return result, Half()

    def _half_last(self, flight: Flight) -> tuple[BackwardResult, Half]:
        share, accumulate = self._share, self._chain.recipe.accumulate
        return run_last_inputs(self._chain, flight.micro, share.start, flight.wires, accumulate)

    def _run_last(
        self, action: Action, run: Callable[[Flight], tuple[BackwardResult, Half]]
    ) -> None:
        """Forward, loss and backward, or half of it, of the last stage."""
        flight = self._begin(action)
        with self._drawing():
            result, half = run(flight)
        assert result.loss is not None
        self._note_loss(action.micro or 0, result.loss)
        self._end(action, result, half)

    @contextmanager
    def _again(self, action: Action) -> Iterator[Flight]:
        """A forward that is run again, with what the first one drew and found."""
        flight, model = self._flights[action.micro or 0], self._chain.model
        after_rng, after = capture_rng(self._device), read_buffers(model, self._share.buffers)
        assert flight.rng is not None
        restore_rng(flight.rng, self._device)
        write_buffers(model, flight.buffers)
        yield flight
        write_buffers(model, after)
        restore_rng(after_rng, self._device)

    def _end(self, action: Action, result: BackwardResult, half: Half | None = None) -> None:
        """Only what the stage before waits for, and the other half, are left of a flight.

        Not its batch: that is one block of memory with all that came with it.
        """
        number = action.micro or 0
        del self._flights[number]
        if self._share.stage:
            self._backs[number] = result
        if half is not None and half.seams:
            self._halves[number] = half

    def _end_of_group(self, action: Action) -> None:
        micro = action.micro or 0
        if self._pipeline.is_last_of_group(micro):
            self._weights.harvest(self._pipeline.group_of(micro))

    def _note_loss(self, micro: int, loss: Tensor) -> None:
        """A loss of a group, whose mean is the step's.

        Raises:
            TrialError: that is not finite, and the recipe does not ignore that.
        """
        group = self._pipeline.group_of(micro)
        self._losses.note(loss)
        if not self._pipeline.is_last_of_group(micro):
            return
        found, self._losses = self._losses.values(), Losses(self._readback)
        mean = functools.reduce(operator.add, found, 0.0) / len(found)  # sum() compensates
        if not (math.isfinite(mean) or self._chain.recipe.on_nonfinite == "ignore"):
            step = self._steps_before + group - self._pipeline.begun + 1
            raise TrialError(
                f"the loss of step {step} is {mean}. Lower the learning rate or clip the "
                "gradients, or train on with Recipe(on_nonfinite='ignore')."
            )
        self.losses.append(found)
        self._on_loss(found)

    # -- steps ----------------------------------------------------------------------------

    def _sync(self, action: Action) -> None:
        """The clipping factor, from the norms of all stages in the order of the model."""
        step, limit = action.version, clip_limit(self._chain.recipe)
        norms = self._norms.pop(step, {}) | self._weights.norms(step)
        own = {n: p for n, p in self._chain.model.named_parameters() if n in norms}
        found, dtypes = [norms[name] for name in own], [p.dtype for p in own.values()]
        self._factors[step] = None if limit is None else clip_factor(limit, found, dtypes)

    def _step(self, action: Action) -> None:
        step = action.version
        self._weights.step(step, self._factors.pop(step, None))
        self._after_step()

    @property
    def end_rng(self) -> RngState:
        """The random state after the last forward that this stage knows of."""
        return self._rng or capture_rng(self._device)


def _given(flight: Flight) -> dict[str, Any]:
    return {"grads": flight.grads, "tied": flight.tied}
