"""What an array's shards cost, and whether a pass in shards is the pass as one: bit for bit.

Everything happens outside the device's budget, on copies, before a trial trains.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.core.spec import ShardSpec
from shoal.core.units import Bytes, Seconds
from shoal.fusion import Array, Declined, Member
from shoal.fusion.batches import layout_of
from shoal.fusion.finish import stacked_norm
from shoal.fusion.fused import StackedBackend
from shoal.fusion.likeness import copies
from shoal.fusion.sharded import ShardBackend
from shoal.memory.store import same_bits
from shoal.partition.chain import Chain
from shoal.partition.track import AllocationTracker
from shoal.runtime.stackedunits import StackedMicro, StackedUnits
from shoal.spill.generate import Route


@dataclass(slots=True)
class _Cost:
    """Of a shard's two units; see ``ShardSpec``."""

    forward_peak: int = 0
    left: int = 0
    stash: int = 0
    backward_peak: int = 0
    carry: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0


@dataclass(slots=True)
class _Outcome:
    """What a pass came to."""

    losses: Tensor
    tensors: dict[str, Tensor] = field(default_factory=dict)


class StackedMeasure:
    """Measures the shards of an array of ``members``, whose batches are on the device.

    ``wall``: what says the time when all that was launched is done.
    """

    def __init__(
        self,
        members: Sequence[Member],
        batches: Sequence[Any],
        chain: Chain,
        device: torch.device,
        wall: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._members, self._batches, self._chain = members, list(batches), chain
        self._device, self._wall = device, wall

    def shards(self, cuts: Sequence[int]) -> tuple[ShardSpec, ...]:
        """The shards between ``cuts``; parameters, state and steps are the caller's to fill.

        Raises:
            Declined: in shards the pass is another one, or does not run.
        """
        spans = tuple(itertools.pairwise([0, *cuts, self._chain.num_layers]))
        whole = self._whole()
        array = Array(copies(self._members), device=self._device, backend=ShardBackend())
        units = self._units(array, spans)
        micro = units.begin(self._batches)
        self._walk(array, units, micro, [_Cost() for _ in spans], tracked=False)  # to learn
        _refuse_failures(micro)
        array = Array(copies(self._members), device=self._device, backend=array.backend)
        units = self._units(array, spans)
        micro = units.begin(self._batches)
        costs = [_Cost() for _ in spans]
        found = self._walk(array, units, micro, costs, tracked=True)
        _refuse_difference(whole, found)
        self._walk(array, units, units.begin(self._batches), costs, tracked=False)
        return tuple(
            ShardSpec(
                index=index,
                layers=span,
                parameter_bytes=Bytes(0),
                owned_bytes=Bytes(0),
                state_bytes=Bytes(0),
                gradient_bytes=Bytes(0),
                boundary_bytes=Bytes(costs[index - 1].left if index else 0),
                carry_bytes=Bytes(cost.carry if index else 0),
                forward_peak_bytes=Bytes(cost.forward_peak),
                backward_peak_bytes=Bytes(cost.backward_peak),
                step_peak_bytes=Bytes(0),
                forward_s=Seconds(cost.forward_s),
                backward_s=Seconds(cost.backward_s),
                stash_bytes=Bytes(cost.stash),
            )
            for index, (span, cost) in enumerate(zip(spans, costs, strict=True))
        )

    def _units(self, array: Array, spans: Sequence[tuple[int, int]]) -> StackedUnits:
        backend, usual = array.backend, layout_of(self._batches[0])
        assert isinstance(backend, ShardBackend)
        route = Route(len(spans))
        return StackedUnits(
            lambda: array.crew,
            backend,
            self._chain,
            spans,
            route,
            lambda batch: layout_of(batch) == usual,
        )

    def _whole(self) -> _Outcome:
        """One pass of an array that is on its device as a whole."""
        array = Array(copies(self._members), device=self._device, backend=StackedBackend())
        active = [True] * array.width
        trained = array.backend.train(array.crew, self._batches, active, self._scale)
        if trained.failures:
            raise Declined(f"a trial raises: {next(iter(trained.failures.values()))}")
        return _outcome(array, trained.losses)

    @property
    def _scale(self) -> float:
        return 1.0 / self._chain.recipe.accumulate

    def _walk(
        self,
        array: Array,
        units: StackedUnits,
        micro: StackedMicro,
        costs: Sequence[_Cost],
        *,
        tracked: bool,
    ) -> _Outcome:
        """Every unit of a pass, counted or timed; what it comes to, if it was counted."""
        last = units.num_shards - 1
        for shard in range(last):
            with AllocationTracker() if tracked else _Nothing() as tracker:
                took = self._timed(lambda s=shard: units.forward(s, micro))  # type: ignore[misc]
            cost = costs[shard]
            if isinstance(tracker, AllocationTracker):
                cost.stash = sum(b.nbytes for b in micro.buffers.get(shard, {}).values())
                cost.left = max(0, tracker.current_bytes - cost.stash)
                cost.forward_peak = tracker.peak_bytes
            else:
                cost.forward_s = took
        self._evaluate_last(array, units, micro, costs[last], tracked=tracked)
        grads: dict[str, Tensor] = {}
        losses = torch.empty(0)
        for shard in reversed(range(last + 1)):
            results: list[Any] = []
            with AllocationTracker() if tracked else _Nothing() as tracker:
                took = self._timed(lambda s=shard, to=results: to.append(units.backward(s, micro)))  # type: ignore[misc]
                _norms(array)
            cost = costs[shard]
            if isinstance(tracker, AllocationTracker):
                handed = {
                    t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                    for t in (*micro.grads.values(), *micro.tied.values())
                }
                cost.carry, cost.backward_peak = sum(handed.values()), tracker.peak_bytes
            else:
                cost.backward_s = took
            if results[0] is not None:
                losses = results[0].losses
            grads |= _taken(array)
        _refuse_failures(micro)
        found = _outcome(array, losses)
        found.tensors |= {f"the gradient of {name!r}": grad for name, grad in grads.items()}
        return found

    def _evaluate_last(
        self,
        array: Array,
        units: StackedUnits,
        micro: StackedMicro,
        cost: _Cost,
        *,
        tracked: bool,
    ) -> None:
        """The last shard's forward as an evaluation has it; nothing is changed by it."""
        streams = array.crew.streams.now()
        buffers = {name: b.clone() for name, b in array.crew.stacked.buffers.items()}
        with AllocationTracker() if tracked else _Nothing() as tracker:
            took = self._timed(lambda: units.forward(units.num_shards - 1, micro))
        if isinstance(tracker, AllocationTracker):
            cost.forward_peak = tracker.peak_bytes
        else:
            cost.forward_s = took
        array.crew.streams.put(streams)
        for name, value in buffers.items():
            array.crew.stacked.buffers[name].data.copy_(value)

    def _timed(self, work: Callable[[], object]) -> float:
        began = self._wall()
        work()
        return max(1e-9, self._wall() - began)


class _Nothing:
    """Counts nothing."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def _norms(array: Array) -> None:
    """What clipping reads, which may take memory."""
    for block in array.crew.stacked.parameters.values():
        if block.grad is not None:
            stacked_norm(block.grad)


def _taken(array: Array) -> dict[str, Tensor]:
    """The stacked gradients, which are gone from their parameters then."""
    found = {}
    for name, block in array.crew.stacked.parameters.items():
        if block.grad is not None:
            found[name], block.grad = block.grad, None
    return found


def _outcome(array: Array, losses: Tensor) -> _Outcome:
    crew = array.crew
    found = {f"the gradient of {name!r}": grad for name, grad in _taken(array).items()}
    found |= {f"the buffer {name!r}": b.clone() for name, b in crew.stacked.buffers.items()}
    for slot in range(crew.width):
        host, local = crew.streams.states(slot)
        found |= {f"the random numbers of slot {slot}": host}
        found |= {} if local is None else {f"those of the device of slot {slot}": local}
    return _Outcome(losses, found)


def _refuse_failures(micro: StackedMicro) -> None:
    if micro.failures:
        raise Declined(f"a trial raises: {next(iter(micro.failures.values()))}")


def _refuse_difference(whole: _Outcome, found: _Outcome) -> None:
    """Raise Declined unless both are the same to the bit."""
    words = _difference(whole.tensors, found.tensors)
    if not same_bits(whole.losses, found.losses):
        words = "the losses"
    if words:
        raise Declined(f"in shards {words} of the array's pass are other bits than as one")


def _difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    for name in {**one, **other}:
        if name not in one or name not in other or not same_bits(one[name], other[name]):
            return name
    return ""
