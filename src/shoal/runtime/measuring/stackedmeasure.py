"""What an array's shards cost, and whether a pass in shards is the array's: before a trial trains.

The array is nowhere as a whole on the device: a shard visits it for its unit, what it leaves
waits in host memory (``visiting``), and every byte on the device is counted against its budget.

[Note: what it is held against]
Where the device is a CPU, the same array as a whole, in host memory, bit for bit. A GPU may have
no room for that, and a CPU has other bits than a GPU: there a few of the trials alone, shard by
shard too, as closely as a dry run compares an array with its trials.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.core.spec import ShardSpec
from shoal.core.units import Bytes, Seconds
from shoal.fusion import Array, Declined, Member
from shoal.fusion.batches import layout_of
from shoal.fusion.finish import stacked_norm
from shoal.fusion.likeness import copies
from shoal.fusion.passes.fused import StackedBackend
from shoal.fusion.passes.sharded import ShardBackend
from shoal.fusion.rows.level import like_alone
from shoal.fusion.rows.unplaced import Unplaced
from shoal.memory.store import same_bits
from shoal.partition.chain import Chain
from shoal.partition.track import AllocationTracker
from shoal.recipes.recipe import tensors_of, to_device
from shoal.rng import RngState
from shoal.runtime.arrays.micro import Result, StackedMicro
from shoal.runtime.arrays.units import StackedUnits
from shoal.runtime.measuring.loneunits import lone_pass_in_shards, unlike
from shoal.runtime.measuring.meter import HOST, Meter, copied_to, stored_bytes
from shoal.runtime.measuring.visiting import Visits
from shoal.spill.generate import Route

COMPARED = 4  # trials alone that an array is held against
TIMED = 2  # passes, of which the quicker counts: one may have met another process


class SlotsRaise(Declined):
    """The code of some ``slots`` raises on the batches that they were measured with."""

    def __init__(self, failures: Mapping[int, BaseException]) -> None:
        super().__init__(f"a trial raises: {next(iter(failures.values()))}")
        self.slots = tuple(failures)


@dataclass(slots=True)
class _Cost:
    """Of a shard's two units; see ``ShardSpec``."""

    forward_peak: int = 0
    left: int = 0
    stash: int = 0
    backward_peak: int = 0
    carry: int = 0
    private: int = 0  # of what enters it, what no other shard reads
    forward_s: float = math.inf
    backward_s: float = math.inf

    @property
    def bytes(self) -> tuple[int, ...]:
        """All that was counted."""
        peaks = self.forward_peak, self.backward_peak
        return (*peaks, self.left, self.stash, self.carry, self.private)


@dataclass(slots=True)
class _Outcome:
    """What a pass came to: gradients, buffers and random streams in words, on the host."""

    losses: Tensor
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Walk:
    """One pass of an array, unit by unit; ``counted``: its bytes are, and it is not timed."""

    array: Array
    units: StackedUnits
    micro: StackedMicro
    visits: Visits
    costs: Sequence[_Cost]
    counted: bool
    grads: dict[str, Tensor] = field(default_factory=dict)
    losses: Tensor = field(default_factory=lambda: torch.empty(0))


class _Open(NamedTuple):
    """An array to walk through; the batches are on its device."""

    array: Array
    units: StackedUnits
    batches: list[Any]


class StackedMeasure:
    """Measures the shards of an array of ``members``, which are in host memory, as their batches.

    ``meter`` counts what is on the device; ``wall`` says the time when all that was launched is
    done. ``as_whole``: held against the array as a whole, or against trials alone. ``one_base``:
    what is frozen is there once. ``any_layout``: it will run batches of others than these, too.
    """

    def __init__(
        self,
        members: Sequence[Member],
        batches: Sequence[Any],
        chain: Chain,
        meter: Meter,
        wall: Callable[[], float],
        *,
        as_whole: bool,
        one_base: bool,
        any_layout: bool,
    ) -> None:
        self._members, self._batches, self._chain = members, list(batches), chain
        self._meter, self._wall, self._as_whole = meter, wall, as_whole
        self._device, self._one_base, self._any_layout = meter.device, one_base, any_layout

    def shards(self, cuts: Sequence[int]) -> tuple[tuple[ShardSpec, ...], tuple[str, ...]]:
        """The shards between ``cuts``; parameters, state and steps are the caller's to fill.

        And which parts run slot by slot since slots decide otherwise in them by their data.

        Raises:
            Declined: in shards the pass is another one, or does not run.
            torch.OutOfMemoryError: a unit needs more than the device has.
        """
        spans = tuple(itertools.pairwise([0, *cuts, self._chain.num_layers]))
        backend = ShardBackend()
        with self._opened(backend, spans) as opened:  # to learn what runs slot by slot
            self._walk(opened, spans, [_Cost() for _ in spans], counted=True)
        costs = [_Cost() for _ in spans]
        with self._opened(backend, spans) as opened:
            found = self._walk(opened, spans, costs, counted=True)
            self._refuse_difference(found, spans)
            for _ in range(TIMED):
                self._walk(opened, spans, costs, counted=False)
        _share_times(self._chain, spans, costs)
        shards = tuple(_spec(index, span, costs) for index, span in enumerate(spans))
        return shards, tuple(backend.by_data)

    @contextmanager
    def _opened(self, backend: ShardBackend, spans: Sequence[tuple[int, int]]) -> Iterator[_Open]:
        """An array that is nowhere but for its buffers and batches, which are on the device."""
        members, where = copies(self._members), self._device
        buffers = [buffer for member in members for buffer in member.module.buffers()]
        with self._meter.hold(buffers, tensors_of(self._batches)):
            array = Array(
                members,
                device=where,
                backend=backend,
                any_layout=self._any_layout,
                one_base=self._one_base,
                stacking=functools.partial(Unplaced, device=where),
            )
            usual = layout_of(self._batches[0])
            units = StackedUnits(
                lambda: array.crew,
                backend,
                self._chain,
                spans,
                Route(len(spans)),
                lambda batch: layout_of(batch) == usual,
            )
            yield _Open(array, units, [to_device(batch, where) for batch in self._batches])

    # -- a walk -----------------------------------------------------------------------

    def _walk(
        self,
        opened: _Open,
        spans: Sequence[tuple[int, int]],
        costs: Sequence[_Cost],
        *,
        counted: bool,
    ) -> _Outcome:
        """One pass, counted or timed; what it comes to, where it is counted."""
        array, stacked = opened.array, opened.array.crew.stacked
        assert isinstance(stacked, Unplaced)
        micro = opened.units.begin(opened.batches)
        visits = Visits(
            micro,
            self._chain,
            spans,
            self._meter,
            parameters=lambda names: _stacked_rows(array, names),
            place=lambda placed: _place(stacked, placed),
            evict=stacked.evict,
        )
        walk = _Walk(array, opened.units, micro, visits, costs, counted)
        self._visit_all(walk)
        return _outcome(walk)

    def _visit_all(self, walk: _Walk) -> None:
        last = walk.units.num_shards - 1
        for shard in range(last):
            with walk.visits.of(shard):
                self._forward(walk, shard)
            _refuse_failures(walk.micro)  # what the next one reads is not there
        with walk.visits.of(last):
            self._evaluate_last(walk, last)
            self._backward(walk, last)
        for shard in reversed(range(last)):
            with walk.visits.of(shard):
                self._backward(walk, shard)
        _refuse_failures(walk.micro)

    def _forward(self, walk: _Walk, shard: int) -> None:
        micro, cost = walk.micro, walk.costs[shard]
        with self._measuring(walk) as tracker:
            took = self._timed(lambda: walk.units.forward(shard, micro))
        if tracker is None:
            cost.forward_s = min(cost.forward_s, took)
            return
        cost.stash = sum(b.nbytes for b in micro.buffers.get(shard, {}).values())
        cost.left = max(0, tracker.current_bytes - cost.stash)
        leaves = walk.units.private(shard + 1, micro)
        walk.costs[shard + 1].private = stored_bytes(leaves.values())
        cost.forward_peak = tracker.peak_bytes

    def _backward(self, walk: _Walk, shard: int) -> None:
        micro, cost = walk.micro, walk.costs[shard]
        results: list[Result | None] = []
        with self._measuring(walk) as tracker:
            took = self._timed(lambda: results.append(walk.units.backward(shard, micro)))
            _norms(walk.array)
        if tracker is None:
            cost.backward_s = min(cost.backward_s, took)
        else:
            handed = (*micro.grads.values(), *micro.tied.values())
            cost.carry, cost.backward_peak = stored_bytes(handed), tracker.peak_bytes
        if (result := results[0]) is not None:
            walk.losses = result.losses
        walk.grads |= copied_to(HOST, _taken(walk.array))

    def _evaluate_last(self, walk: _Walk, shard: int) -> None:
        """The last shard's forward as an evaluation has it; nothing is changed by it."""
        crew, cost = walk.array.crew, walk.costs[shard]
        streams, buffers = crew.streams.now(), copied_to(HOST, crew.stacked.buffers)
        with self._measuring(walk) as tracker:
            took = self._timed(lambda: walk.units.forward(shard, walk.micro))
        if tracker is None:
            cost.forward_s = min(cost.forward_s, took)
        else:
            cost.forward_peak = tracker.peak_bytes
        crew.streams.put(streams)
        for name, value in buffers.items():
            crew.stacked.buffers[name].data.copy_(value)

    @contextmanager
    def _measuring(self, walk: _Walk) -> Iterator[AllocationTracker | None]:
        with self._meter.counting() if walk.counted else nullcontext() as tracker:
            yield tracker

    def _timed(self, work: Callable[[], object]) -> float:
        began = self._wall()
        work()
        return max(1e-9, self._wall() - began)

    # -- what it is held against ------------------------------------------------------

    def _refuse_difference(self, found: _Outcome, spans: Sequence[tuple[int, int]]) -> None:
        """Raise Declined unless it is the array's pass."""
        if not self._as_whole:
            self._refuse_unlike(found, spans)
            return
        whole = self._whole()
        words = _difference(whole.tensors, found.tensors)
        if not same_bits(whole.losses, found.losses):
            words = "the losses"
        if words:
            raise Declined(f"in shards {words} of the array's pass are other bits than as one")

    def _whole(self) -> _Outcome:
        """One pass of the array as a whole, in host memory."""
        array = Array(
            copies(self._members),
            device=HOST,
            backend=StackedBackend(),
            one_base=self._one_base,
        )
        active, scale = [True] * array.width, 1.0 / self._chain.recipe.accumulate
        trained = array.backend.train(array.crew, self._batches, active, scale)
        if trained.failures:
            raise Declined(f"a trial raises: {next(iter(trained.failures.values()))}")
        return _Outcome(trained.losses, _named(_taken(array)) | _state_of(array))

    def _refuse_unlike(self, found: _Outcome, spans: Sequence[tuple[int, int]]) -> None:
        for slot, member in enumerate(copies(self._members[:COMPARED])):
            batch = self._batches[slot]
            lone = lone_pass_in_shards(member, batch, self._chain, spans, self._meter)
            grads = _rows(found.tensors, GRADIENT, slot)
            buffers = _rows(found.tensors, BUFFER, slot)
            words = unlike(lone, float(found.losses[slot]), grads, buffers)
            if not words and not _same_streams(found.tensors, slot, lone.rng):
                words = "it draws other random numbers"
            if words:
                raise Declined(
                    f"one pass as an array in shards is not the pass alone: slot {slot}: {words}."
                )


def _share_times(chain: Chain, spans: Sequence[tuple[int, int]], costs: Sequence[_Cost]) -> None:
    """Of shards that are alike the quickest is taken for all: they do the same work."""
    alike: dict[Hashable, list[_Cost]] = {}
    for span, cost in zip(spans, costs, strict=True):
        alike.setdefault((_kind(chain, span), *cost.bytes), []).append(cost)
    for some in alike.values():
        forward_s = min(cost.forward_s for cost in some)
        backward_s = min(cost.backward_s for cost in some)
        for cost in some:
            cost.forward_s, cost.backward_s = forward_s, backward_s


def _kind(chain: Chain, span: tuple[int, int]) -> Hashable:
    """Equal for spans of the same modules; of what the forward does between them none is."""
    sections = chain.skeleton.sections
    if any(sections.headed_by(layer) is not None for layer in range(*span)):
        return span
    modules = [chain.skeleton.blocks[sections.position_of(layer)].module for layer in range(*span)]
    shapes = [tuple((tuple(p.shape), p.dtype) for p in module.parameters()) for module in modules]
    return tuple(map(repr, modules)), tuple(shapes)


def _spec(index: int, span: tuple[int, int], costs: Sequence[_Cost]) -> ShardSpec:
    cost = costs[index]
    return ShardSpec(
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
        private_bytes=Bytes(min(cost.private, costs[index - 1].left) if index else 0),
    )


def _stacked_rows(array: Array, names: Sequence[str]) -> dict[str, Tensor]:
    """The members' parameters as rows, in host memory; of the base one for all of them."""
    found = {}
    modules = [member.module for member in array.crew.members]
    for name in names:
        some = modules[:1] if name in array.crew.stacked.base else modules
        mine = [module.get_parameter(name).detach() for module in some]
        rows = found[name] = like_alone(len(mine), mine[0], HOST)
        for row, parameter in zip(rows, mine, strict=True):
            row.copy_(parameter)
    return found


def _place(stacked: Unplaced, placed: Mapping[str, Tensor]) -> None:
    for name, tensor in placed.items():
        width = len(stacked.parameters[name])
        stacked.place(name, tensor.expand(width, *tensor.shape[1:]))


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


GRADIENT, BUFFER = "the gradient of ", "the buffer "
STREAM, LOCAL = "the random numbers of slot ", "those on the device of slot "


def _named(grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{GRADIENT}{name}": grad for name, grad in grads.items()}


def _rows(tensors: Mapping[str, Tensor], kind: str, slot: int) -> dict[str, Tensor]:
    """Of gradients or of buffers one slot's, by the names that the model has for them."""
    found = {name: tensor for name, tensor in tensors.items() if name.startswith(kind)}
    return {name.removeprefix(kind): tensor[slot] for name, tensor in found.items()}


def _same_streams(tensors: Mapping[str, Tensor], slot: int, rng: RngState) -> bool:
    local = tensors.get(f"{LOCAL}{slot}")
    return torch.equal(tensors[f"{STREAM}{slot}"], rng.torch) and (
        local is None or rng.cuda is None or torch.equal(local, rng.cuda)
    )


def _state_of(array: Array) -> dict[str, Tensor]:
    """Buffers and random streams, on the host."""
    crew = array.crew
    buffers = copied_to(HOST, crew.stacked.buffers)
    found = {f"{BUFFER}{name}": buffer for name, buffer in buffers.items()}
    for slot in range(crew.width):
        drawn = crew.streams.state(slot)
        found |= {f"{STREAM}{slot}": drawn.torch}
        found |= {} if drawn.cuda is None else {f"{LOCAL}{slot}": drawn.cuda}
    return found


def _outcome(walk: _Walk) -> _Outcome:
    return _Outcome(walk.losses, _named(walk.grads) | _state_of(walk.array))


def _refuse_failures(micro: StackedMicro) -> None:
    if micro.failures:
        raise SlotsRaise(micro.failures)


def _difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    for name in {**one, **other}:
        if name not in one or name not in other or not same_bits(one[name], other[name]):
            return name
    return ""
