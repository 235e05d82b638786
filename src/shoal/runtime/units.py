"""What F and B compute: the whole module at once, or one shard of its chain.

Both kinds run the user's module on the user's batch with the recipe's own loss; they
differ in what stays alive between units. Parameters are bound and the trial's random
streams are in place when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.core.errors import NarrowError, OrderError
from shoal.partition.chain import Chain
from shoal.partition.draws import DrawRecorder
from shoal.partition.measure import private_wires
from shoal.partition.narrow import UseWatch
from shoal.partition.preserve import read_buffers, write_buffers
from shoal.partition.savedset import Cell
from shoal.partition.units import (
    BackwardResult,
    Held,
    run_backward,
    run_forward,
    run_held_backward,
    run_held_forward,
)
from shoal.partition.wires import storage_key
from shoal.program.ir import Program
from shoal.recipes.ownstep import Losses, OwnStep, own_evaluation
from shoal.recipes.recipe import HP, Recipe, autocast, loss_and_output
from shoal.rng import RngState, capture_rng, restore_rng
from shoal.runtime.streams import Stream, drawing_nothing
from shoal.spill import generate

BY_MICRO = "technique=shoal.Spilled(order='micro')"
"""The way out where random numbers would come in another order."""
_DREW = (
    "the model drew random numbers, which it did not when it was measured, and its shards run all "
    "micro-batches of a step one after another, in another order than the plain loop. Train it "
    f"with {BY_MICRO}."
)


@dataclass(slots=True)
class Micro:
    """What one micro-batch leaves on the device between its units."""

    batch: Any
    context: Any = None  # the chain's call sheet
    wires: dict[Any, Tensor] = field(default_factory=dict)
    grads: dict[Any, Tensor] = field(default_factory=dict)  # of the wires, on the way back
    away: dict[int, dict[Any, Tensor]] = field(default_factory=dict)  # shard -> wires on the host
    held: dict[int, Held] = field(default_factory=dict)  # shard -> its forward, with gradients
    tied: dict[str, Tensor] = field(default_factory=dict)  # gradients of borrowed parameters
    rng: dict[int, RngState] = field(default_factory=dict)  # before each shard's forward
    stream: Stream | None = None  # of one whose forwards overlap those of the next, and draw
    buffers: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    written: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)  # parameters
    losses: Losses | None = None  # of a step of one's own
    metrics: dict[str, float] | None = None  # of an evaluation of one's own

    def has_wire(self, wire: Any) -> bool:
        """Whether it is on the device."""
        return wire in self.wires

    def forget_wire(self, wire: Any) -> None:
        """It waits elsewhere now."""
        del self.wires[wire]

    def put_wire(self, wire: Any, tensor: Tensor) -> None:
        """It is back."""
        self.wires[wire] = tensor

    def tensors(self) -> list[Tensor]:
        """Everything held, for the byte count."""
        held = [*self.wires.values(), *self.grads.values(), *self.tied.values()]
        held += [t for one in self.held.values() if one.saved for t in one.saved.here()]
        return held + [
            tensor
            for stash in (*self.buffers.values(), *self.written.values())
            for tensor in stash.values()
        ]


class Units(Protocol):
    """How a technique computes."""

    num_shards: int
    frozen: int
    """So many of the first shards have a forward alone in a step."""

    def written(self, shard: int) -> Sequence[str]:
        """Parameters that a forward of the shard itself changes (an embedding's max_norm)."""

    def begin(self, batch: Any) -> Micro:
        """Take up a batch that is on the device."""

    def forward(self, shard: int, micro: Micro) -> tuple[Tensor, Any] | None:
        """A forward without gradients; loss and output when it is the last shard's."""

    def backward(self, shard: int, micro: Micro) -> Tensor | None:
        """A forward with gradients and the backward; the loss when it is the last shard's.

        Gradients are added to the bound parameters' ``grad``.
        """

    def private(self, shard: int, micro: Micro) -> dict[Any, Tensor]:
        """Of a shard's input, what no other shard reads, so that it may wait on the host."""

    def movable(self, shard: int, micro: Micro) -> list[Cell]:
        """Of what a shard's forward saved, what may wait on the host."""

    def step_program(self, micro_batches: int, clip: bool) -> Program:
        """One optimizer step."""

    def micro_program(self, micro: int) -> Program:
        """One batch of a step whose number of batches is not known yet."""

    def finish_program(self, clip: bool) -> Program:
        """The step after such batches."""

    def evaluation_program(self) -> Program:
        """One validation batch."""


class ResidentUnits:
    """The whole module in one unit, as a plain loop runs it."""

    num_shards, frozen = 1, 0

    def __init__(self, model: nn.Module, recipe: Recipe, device: torch.device) -> None:
        self._model, self._recipe = model, recipe
        self._autocast = autocast(recipe, device)  # made once: making it is slow

    def written(self, shard: int) -> Sequence[str]:
        return ()

    def begin(self, batch: Any) -> Micro:
        return Micro(batch)

    def forward(self, shard: int, micro: Micro) -> tuple[Tensor, Any] | None:
        with torch.no_grad():
            return self._loss(micro.batch)

    def backward(self, shard: int, micro: Micro) -> Tensor | None:
        loss = self._loss(micro.batch)[0]  # the output is free before the backward
        accumulate = self._recipe.accumulate
        (loss if accumulate == 1 else loss / accumulate).backward()
        return loss.detach()  # nothing of the graph outlives the pass: see cudagraph.py

    def _loss(self, batch: Any) -> tuple[Tensor, Any]:
        with self._autocast:
            return loss_and_output(self._recipe, self._model, batch)

    def private(self, shard: int, micro: Micro) -> dict[Any, Tensor]:
        return {}

    def movable(self, shard: int, micro: Micro) -> list[Cell]:
        return []

    def step_program(self, micro_batches: int, clip: bool) -> Program:
        return generate.resident_step(micro_batches=micro_batches, clip=clip)

    def micro_program(self, micro: int) -> Program:
        return generate.resident_micro(micro)

    def finish_program(self, clip: bool) -> Program:
        return generate.resident_step(micro_batches=0, clip=clip)

    def evaluation_program(self) -> Program:
        return generate.resident_evaluation()


class OwnUnits(ResidentUnits):
    """A step of one's own in one unit, with the optimizers' steps; see ``recipes/ownstep.py``."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        device: torch.device,
        step: OwnStep,
        number: Callable[[], int],
        hp: HP,
    ) -> None:
        super().__init__(model, recipe, device)
        self._step, self._number, self._hp = step, number, hp

    def forward(self, shard: int, micro: Micro) -> tuple[Tensor, Any] | None:
        if self._recipe.evaluate is None:
            return super().forward(shard, micro)
        with torch.no_grad():
            micro.metrics = own_evaluation(self._recipe, self._model, micro.batch, self._hp)
        return None

    def backward(self, shard: int, micro: Micro) -> Tensor | None:
        micro.losses = self._step(micro.batch, self._number())
        return None


class ChainUnits:
    """One shard at a time; a shard's backward runs its forward again.

    The recomputed forward sees the random numbers and the buffers that the first one saw,
    and leaves both as the first one left them. Where the route says so, nothing is recomputed.
    Where all micro-batches are in each shard, one that draws has a stream of its own.
    """

    def __init__(
        self,
        chain: Chain,
        recipe: Recipe,
        spans: Sequence[tuple[int, int]],
        device: torch.device,
        route: generate.Route,
        uses: UseWatch | None = None,
    ) -> None:
        self._uses = uses  # of narrow weights
        self.chain, self._recipe, self._device = chain, recipe, device
        self._spans, self._route = spans, route
        self.num_shards, self.frozen = len(spans), route.frozen
        self._written = [
            [name for layer in range(*span) for name in chain.written_parameters(layer)]
            for span in spans
        ]
        self._buffers = [
            [name for layer in range(*span) for name in chain.changing_buffers(layer)]
            for span in spans
        ]
        self._unwritten = [chain.unwritten(*span) for span in spans]

    def written(self, shard: int) -> Sequence[str]:
        return self._written[shard]

    def begin(self, batch: Any) -> Micro:
        return Micro(batch, context=self.chain.begin(batch))

    def forward(self, shard: int, micro: Micro) -> tuple[Tensor, Any] | None:
        with self._watched():
            return self._forward(shard, micro)

    def backward(self, shard: int, micro: Micro) -> Tensor | None:
        with self._watched():
            return self._backward(shard, micro)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Narrow weights are read by products alone, as when they were measured.

        Raises:
            NarrowError: one was read otherwise; nothing has stepped since.
        """
        if self._uses is None:
            yield
            return
        self._uses.restart()
        with self._uses:
            yield
        sums = self._recipe.accumulate > 1
        often = [name for name, count in self._uses.counts.items() if sums and count > 1]
        for name in (*self._uses.odd, *often):
            how = self._uses.odd.get(name, "several products")
            raise NarrowError(
                f"the forward read {name!r} by {how}, which it did not when it was measured, and "
                "the weight is here as bfloat16. Train with shoal.Spilled(transfer='fp32')."
            )

    def _forward(self, shard: int, micro: Micro) -> tuple[Tensor, Any] | None:
        if shard == self.num_shards - 1:
            return self._evaluate(micro)
        saves = (*self._route.saves, *self._route.spills)
        if shard in saves and self.chain.model.training:
            self._forward_and_hold(shard, micro)
            return None
        start, stop = self._spans[shard]
        goes_back = self.chain.model.training and shard >= self.frozen
        with self._drawing(micro):
            if goes_back:
                micro.rng[shard] = capture_rng(self._device)
                micro.buffers[shard] = read_buffers(self.chain.model, self._buffers[shard])
                micro.written[shard] = self._read_written(shard)
            with self._unwritten[shard].required() if goes_back else nullcontext():
                micro.wires |= run_forward(self.chain, micro.context, start, stop, micro.wires)
        if not goes_back:
            self._keep(micro, [stop])
        return None

    def record(self, shard: int, micro: Micro, recorder: DrawRecorder) -> None:
        """A forward for what it draws alone: nothing else of it is there afterwards."""
        model, (start, stop) = self.chain.model, self._spans[shard]
        buffers = read_buffers(model, self._buffers[shard])
        written = self._read_written(shard)
        with recorder:
            if shard == self.num_shards - 1:
                self._evaluate(micro)
            else:
                micro.wires |= run_forward(self.chain, micro.context, start, stop, micro.wires)
                self._keep(micro, [stop])
        write_buffers(model, buffers)
        self._write_written(written)

    def _forward_and_hold(self, shard: int, micro: Micro) -> None:
        """The forward as the plain loop runs it: its backward finds what it saved."""
        start, stop = self._spans[shard]
        wires = self._wires_into(start, micro)
        spills = shard in self._route.spills
        micro.held[shard] = held = run_held_forward(
            self.chain, micro.context, start, stop, wires, spills=spills
        )
        micro.wires |= held.made
        held.made.clear()

    def _wires_into(self, start: int, micro: Micro) -> dict[Any, Tensor]:
        alive = self.chain.live_wires(start, micro.context) if start else ()
        return {wire: micro.wires[wire] for wire in alive}

    def _evaluate(self, micro: Micro) -> tuple[Tensor, Any]:
        start, _ = self._spans[-1]
        with torch.no_grad(), autocast(self._recipe, self._device):
            return self.chain.loss(micro.context, start, micro.wires)

    def _backward(self, shard: int, micro: Micro) -> Tensor | None:
        last = shard == self.num_shards - 1
        if last:
            with self._drawing(micro):
                loss = self._run_backward(shard, micro)
            if micro.stream is not None:  # before anything steps
                micro.stream.require_foretold(BY_MICRO, OrderError)
            return loss
        if shard in micro.held:
            start, stop = self._spans[shard]
            held = micro.held.pop(shard)
            result = run_held_backward(
                self.chain,
                micro.context,
                start,
                stop,
                held,
                grads=micro.grads,
                tied=micro.tied,
                wires=self._wires_into(start, micro) if held.saved else None,
            )
            self._hand_on(shard, micro, result)
            return None
        after_rng = capture_rng(self._device)
        after = read_buffers(self.chain.model, self._buffers[shard])
        after_written = self._read_written(shard)
        restore_rng(micro.rng.pop(shard), self._device)
        write_buffers(self.chain.model, micro.buffers.pop(shard))
        self._write_written(micro.written.pop(shard))
        self._run_backward(shard, micro)
        # Only now: batch_norm saves its running statistics for the backward.
        write_buffers(self.chain.model, after)
        self._write_written(after_written)
        restore_rng(after_rng, self._device)
        return None

    @contextmanager
    def _drawing(self, micro: Micro) -> Iterator[None]:
        """A first forward; with all micro-batches in each shard from the stream of its own.

        Raises:
            OrderError: it draws random numbers, and has no such stream.
        """
        if self._route.order == "micro" or not self.chain.model.training:
            yield
            return
        drawing = drawing_nothing(self._device, OrderError(_DREW))
        with micro.stream.going_on(self._device) if micro.stream else drawing:
            yield

    def _read_written(self, shard: int) -> dict[str, Tensor]:
        model = self.chain.model
        return {n: model.get_parameter(n).data.clone() for n in self._written[shard]}

    def _write_written(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.chain.model.get_parameter(name).data.copy_(value)

    def _run_backward(self, shard: int, micro: Micro) -> Tensor | None:
        start, stop = self._spans[shard]
        wires = self._wires_into(start, micro)
        result = run_backward(
            self.chain,
            micro.context,
            start,
            stop,
            wires,
            grads=micro.grads,
            tied=micro.tied,
            accumulate=self._recipe.accumulate,
        )
        self._hand_on(shard, micro, result)
        return result.loss

    def _hand_on(self, shard: int, micro: Micro, result: BackwardResult) -> None:
        micro.grads, micro.tied = dict(result.grads), dict(result.tied)
        self._keep(micro, [first for first, _ in self._spans[max(1, self.frozen) : shard]])

    def _keep(self, micro: Micro, boundaries: Iterable[int]) -> None:
        """Forget the wires that no shard starting at one of ``boundaries`` reads."""
        alive = {w for layer in boundaries for w in self.chain.live_wires(layer, micro.context)}
        micro.wires = {wire: tensor for wire, tensor in micro.wires.items() if wire in alive}

    def movable(self, shard: int, micro: Micro) -> list[Cell]:
        saved = micro.held[shard].saved
        assert saved is not None, "the route says which forwards may leave"
        made = self._spans[shard][1]
        outputs = {storage_key(t) for wire, t in micro.wires.items() if wire.layer < made}
        cells = saved.movable(outputs)
        saved.moved.update(cells)
        return cells

    def private(self, shard: int, micro: Micro) -> dict[Any, Tensor]:
        before, here = self._spans[shard - 1 : shard + 1]
        return private_wires(self.chain, micro.context, before, here, micro.wires)

    def step_program(self, micro_batches: int, clip: bool) -> Program:
        return self._route.step(micro_batches, clip)

    def micro_program(self, micro: int) -> Program:
        return self._route.micro(micro)

    def finish_program(self, clip: bool) -> Program:
        return self._route.finish(clip)

    def evaluation_program(self) -> Program:
        return self._route.evaluation()


Buffer = tuple[nn.Module, str]


def get(entry: Buffer) -> Tensor:
    """The buffer at a place that ``place_of`` found."""
    buffer = entry[0]._buffers[entry[1]]
    assert buffer is not None
    return buffer
