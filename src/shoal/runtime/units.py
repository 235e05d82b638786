"""What F and B compute: the whole module at once, or one shard of its chain.

Both kinds run the user's module on the user's batch with the recipe's own loss; they
differ in what stays alive between units. Parameters are bound and the trial's random
streams are in place when they are called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.core.errors import TrialError
from shoal.core.spec import Order, Place
from shoal.partition.chain import Chain
from shoal.partition.preserve import read_buffers, write_buffers
from shoal.partition.units import run_backward, run_forward
from shoal.program.ir import Program
from shoal.recipe import Recipe, autocast, compute_loss, model_inputs
from shoal.rng import RngState, capture_rng, restore_rng, same_rng
from shoal.spill import generate


@dataclass(slots=True)
class Micro:
    """What one micro-batch leaves on the device between its units."""

    batch: Any
    context: Any = None  # the chain's call sheet
    wires: dict[Any, Tensor] = field(default_factory=dict)
    grads: dict[Any, Tensor] = field(default_factory=dict)  # of the wires, on the way back
    tied: dict[str, Tensor] = field(default_factory=dict)  # gradients of borrowed parameters
    rng: dict[int, RngState] = field(default_factory=dict)  # before each shard's forward
    buffers: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    written: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)  # parameters

    def tensors(self) -> list[Tensor]:
        """Everything held, for the byte count."""
        held = [*self.wires.values(), *self.grads.values(), *self.tied.values()]
        return held + [
            tensor
            for stash in (*self.buffers.values(), *self.written.values())
            for tensor in stash.values()
        ]


class Units(Protocol):
    """How a technique computes."""

    num_shards: int

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

    num_shards = 1

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
        return loss

    def _loss(self, batch: Any) -> tuple[Tensor, Any]:
        with self._autocast:
            args, kwargs = model_inputs(self._recipe, batch)
            output = self._model(*args, **kwargs)
            return compute_loss(self._recipe, output, batch), output

    def step_program(self, micro_batches: int, clip: bool) -> Program:
        return generate.resident_step(micro_batches=micro_batches, clip=clip)

    def micro_program(self, micro: int) -> Program:
        return generate.resident_micro(micro)

    def finish_program(self, clip: bool) -> Program:
        return generate.resident_step(micro_batches=0, clip=clip)

    def evaluation_program(self) -> Program:
        return generate.evaluation(1, spilled=False)


class ChainUnits:
    """One shard at a time; a shard's backward runs its forward again.

    The recomputed forward sees the random numbers and the buffers that the first one saw,
    and leaves both as the first one left them.
    """

    def __init__(
        self,
        chain: Chain,
        recipe: Recipe,
        spans: Sequence[tuple[int, int]],
        device: torch.device,
        *,
        optimizer: Place,
        lookahead: int,
        keep: tuple[int, ...],
        weights: tuple[int, ...],
        lent: tuple[int, ...],
        order: Order,
    ) -> None:
        self.chain, self._recipe, self._device = chain, recipe, device
        self._spans = spans
        self._optimizer, self._lookahead = optimizer, lookahead
        self._keep_here, self._weights, self._lent, self._order = keep, weights, lent, order
        self.num_shards = len(spans)
        self._written = [
            [name for layer in range(*span) for name in chain.written_parameters(layer)]
            for span in spans
        ]
        self._buffers = [
            [name for layer in range(*span) for name in chain.changing_buffers(layer)]
            for span in spans
        ]

    def written(self, shard: int) -> Sequence[str]:
        return self._written[shard]

    def begin(self, batch: Any) -> Micro:
        return Micro(batch, context=self.chain.begin(batch))

    def forward(self, shard: int, micro: Micro) -> tuple[Tensor, Any] | None:
        if shard == self.num_shards - 1:
            return self._evaluate(micro)
        if self.chain.model.training:
            micro.rng[shard] = capture_rng(self._device)
            micro.buffers[shard] = read_buffers(self.chain.model, self._buffers[shard])
            micro.written[shard] = self._read_written(shard)
        start, stop = self._spans[shard]
        with self._undrawn():
            new = run_forward(self.chain, micro.context, start, stop, micro.wires)
        micro.wires |= new
        if not self.chain.model.training:
            self._keep(micro, [stop])
        return None

    def _evaluate(self, micro: Micro) -> tuple[Tensor, Any]:
        start, _ = self._spans[-1]
        with torch.no_grad(), autocast(self._recipe, self._device):
            return self.chain.loss(micro.context, start, micro.wires)

    def backward(self, shard: int, micro: Micro) -> Tensor | None:
        last = shard == self.num_shards - 1
        if last:
            with self._undrawn():
                return self._run_backward(shard, micro)
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
    def _undrawn(self) -> Iterator[None]:
        """With all micro-batches in each shard, random numbers would be drawn in another order.

        Raises:
            TrialError: some were drawn.
        """
        if self._order == "micro" or not self.chain.model.training:
            yield
            return
        before = capture_rng(self._device)
        yield
        if not same_rng(before, capture_rng(self._device)):
            raise TrialError(
                "the model drew random numbers, which it did not when it was measured, and its "
                "shards run all micro-batches of a step one after another, in another order than "
                "the plain loop. Train it with technique=shoal.Spilled(order='micro')."
            )

    def _read_written(self, shard: int) -> dict[str, Tensor]:
        model = self.chain.model
        return {n: model.get_parameter(n).data.clone() for n in self._written[shard]}

    def _write_written(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.chain.model.get_parameter(name).data.copy_(value)

    def _run_backward(self, shard: int, micro: Micro) -> Tensor | None:
        start, stop = self._spans[shard]
        alive = self.chain.live_wires(start, micro.context) if shard else ()
        wires = {wire: micro.wires[wire] for wire in alive}
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
        micro.grads, micro.tied = dict(result.grads), dict(result.tied)
        self._keep(micro, [first for first, _ in self._spans[1:shard]])
        return result.loss

    def _keep(self, micro: Micro, boundaries: Iterable[int]) -> None:
        """Forget the wires that no shard starting at one of ``boundaries`` reads."""
        alive = {w for layer in boundaries for w in self.chain.live_wires(layer, micro.context)}
        micro.wires = {wire: tensor for wire, tensor in micro.wires.items() if wire in alive}

    def step_program(self, micro_batches: int, clip: bool) -> Program:
        return generate.spilled_step(
            self.num_shards,
            micro_batches=micro_batches,
            clip=clip,
            optimizer=self._optimizer,
            lookahead=self._lookahead,
            keep=self._keep_here,
            weights=self._weights,
            lent=self._lent,
            order=self._order,
        )

    def micro_program(self, micro: int) -> Program:
        return generate.spilled_micro(
            self.num_shards,
            micro,
            lookahead=self._lookahead,
            keep=self._keep_here,
            weights=self._weights,
        )

    def finish_program(self, clip: bool) -> Program:
        return generate.spilled_finish(
            self.num_shards,
            clip=clip,
            optimizer=self._optimizer,
            lookahead=self._lookahead,
            keep=self._keep_here,
            weights=self._weights,
            lent=self._lent,
        )

    def evaluation_program(self) -> Program:
        return generate.evaluation(
            self.num_shards,
            spilled=True,
            lookahead=self._lookahead,
            keep=self._keep_here,
            weights=self._weights,
        )


Buffer = tuple[nn.Module, str]


def locate(model: nn.Module, name: str) -> Buffer:
    """The module that holds a buffer, and the buffer's name there."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def get(entry: Buffer) -> Tensor:
    """The buffer at a place that ``locate`` found."""
    buffer = entry[0]._buffers[entry[1]]
    assert buffer is not None
    return buffer


def evaluate_metrics(recipe: Recipe, loss: Tensor, output: Any, batch: Any) -> dict[str, float]:
    """The names and values of one validation batch."""
    values: Mapping[str, float] = {
        f"valid_{name}": float(metric(output, batch)) for name, metric in recipe.metrics.items()
    }
    return {"valid_loss": float(loss), **values}
