"""What layers and shards of a chain cost: bytes by the tracker, seconds by the clock."""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.core.spec import ALIGNMENT, Halves, LayerMeasure, Narrow, ShardSpec
from shoal.core.units import Bytes, Seconds, round_up
from shoal.partition.build import clone_batch
from shoal.partition.chain import Chain, Micro
from shoal.partition.drive import (
    Ranges,
    Visit,
    every_layer,
    open_visit,
    recompute,
    run_evaluation,
)
from shoal.partition.halfmeasure import measure_halves
from shoal.partition.narrow import narrowed
from shoal.partition.preserve import drop_gradients, preserved
from shoal.partition.rehearsal import Rehearsal, outcome, rehearse
from shoal.partition.ties import cast_key
from shoal.partition.track import AllocationTracker
from shoal.partition.units import BackwardResult, run_forward
from shoal.partition.visitors import There, everywhere
from shoal.partition.wires import Wire, Wires, storage_key
from shoal.recipes.recipe import Batch, tensors_of
from shoal.rng import capture_rng

Timed = Callable[[Callable[[], object]], float]
"""Runs a unit, once or more, and says how many seconds it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """How units are measured.

    ``cast`` are parameters whose gradients come as bfloat16 and stand for float32. ``rehearses``:
    whether what forwards save is sent to the host and back, which is known of shards alone.
    ``halves``: whether backwards are run in two as well. ``there`` has a range's parameters on the
    chain's device while its units run.
    """

    timed: Timed
    there: There
    rehearses: bool
    halves: bool
    cast: Collection[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """One range of layers, its forward and its backward unit."""

    boundary_bytes: int  # what its forward leaves behind for later
    carry_bytes: int  # gradients its backward hands on
    forward_peak_bytes: int
    saved_bytes: int
    saved_output_bytes: int
    saving_peak_bytes: int
    backward_peak_bytes: int
    forward_s: float
    backward_s: float
    rehearsal: Rehearsal  # what of it can wait on the host
    private_bytes: int = 0  # what enters it from the range before and no later one reads
    stash_bytes: int = 0  # what its forward changes, as it was
    scratch_bytes: int = 0  # of kernels, in one of the peaks
    halves: Halves | None = None


def measure_layers(
    chain: Chain,
    batch: Batch,
    state_bytes: Mapping[str, int],
    *,
    timed: Timed | None = None,
    narrow: Collection[str] = (),
    sums: bool = False,
    halves: bool = False,
    there: There = everywhere,
) -> tuple[LayerMeasure, ...]:
    """Every layer as a shard of its own, measured on ``batch``.

    ``state_bytes`` are the aligned bytes of each parameter's optimizer state. Of layers
    that are alike only the first is measured. Seconds of a step are not known here: 0.
    Buffers, gradients and random state are afterwards as before, not parameters that a
    forward writes to. With ``halves`` backwards are measured in two as well.
    """
    ranges = every_layer(chain)
    timed = timed or faster_of_two()
    how = _How(timed=timed, rehearses=False, halves=halves, there=there)
    costs = _measure(chain, batch, ranges, how)
    narrows = _measure_narrow(chain, batch, ranges, how, narrow, sums)
    first = trained_from(chain)
    return tuple(
        LayerMeasure(
            name=name,
            parameter_bytes=_parameter_bytes(chain, chain.parameters_of(layer)),
            state_bytes=Bytes(sum(state_bytes.get(n, 0) for n in chain.parameters_of(layer))),
            borrowed_bytes=_parameter_bytes(chain, chain.borrowed_by(layer)),
            boundary_bytes=Bytes(cost.boundary_bytes),
            carry_bytes=Bytes(cost.carry_bytes),
            forward_peak_bytes=Bytes(cost.forward_peak_bytes),
            saved_bytes=Bytes(cost.saved_bytes),
            backward_peak_bytes=Bytes(cost.backward_peak_bytes),
            forward_s=Seconds(cost.forward_s),
            backward_s=Seconds(cost.backward_s),
            step_s=Seconds(0.0),
            private_bytes=Bytes(cost.private_bytes),
            stash_bytes=Bytes(cost.stash_bytes),
            gradient_bytes=_gradient_bytes(chain, chain.parameters_of(layer)),
            frozen=layer < first,
            narrow=narrows[layer],
            halves=cost.halves,
        )
        for layer, (name, cost) in enumerate(zip(chain.layer_names, costs, strict=True))
    )


def measure_shards(
    chain: Chain,
    cuts: Sequence[int],
    batch: Batch,
    state_bytes: Mapping[str, int],
    *,
    timed: Timed | None = None,
    narrow: Collection[str] = (),
    sums: bool = False,
    halves: bool = False,
    there: There = everywhere,
) -> tuple[ShardSpec, ...]:
    """The shards between ``cuts``, each distinct one's units run and counted to the byte.

    A boundary is counted where it enters first: a mask that passes through five shards
    is in the second one's ``boundary_bytes`` only. What a step needs is the caller's to fill.
    """
    ranges = tuple(itertools.pairwise([0, *cuts, chain.num_layers]))
    timed = timed or faster_of_two()
    how = _How(timed=timed, rehearses=True, halves=halves, there=there)
    costs = _measure(chain, batch, ranges, how)
    narrows = _measure_narrow(chain, batch, ranges, how, narrow, sums)
    first = trained_from(chain)
    specs = []
    for index, (span, cost) in enumerate(zip(ranges, costs, strict=True)):
        owned = [name for layer in range(*span) for name in chain.parameters_of(layer)]
        used = [name for layer in range(*span) for name in chain.borrowed_by(layer)]
        borrowed = [name for name in dict.fromkeys(used) if name not in owned]
        specs.append(
            ShardSpec(
                index=index,
                layers=span,
                parameter_bytes=_parameter_bytes(chain, [*owned, *borrowed]),
                owned_bytes=_parameter_bytes(chain, owned),
                state_bytes=Bytes(sum(state_bytes.get(name, 0) for name in owned)),
                gradient_bytes=_gradient_bytes(chain, owned),
                boundary_bytes=Bytes(costs[index - 1].boundary_bytes if index else 0),
                carry_bytes=Bytes(cost.carry_bytes if index else 0),
                forward_peak_bytes=Bytes(cost.forward_peak_bytes),
                backward_peak_bytes=Bytes(cost.backward_peak_bytes),
                step_peak_bytes=Bytes(0),
                forward_s=Seconds(cost.forward_s),
                backward_s=Seconds(cost.backward_s),
                private_bytes=Bytes(cost.private_bytes),
                saved_bytes=Bytes(cost.saved_bytes) if may_hold(chain, span) else None,
                saved_output_bytes=Bytes(cost.saved_output_bytes),
                saving_peak_bytes=Bytes(cost.saving_peak_bytes),
                movable_bytes=_movable(cost),
                why_not_movable=cost.rehearsal.why_not,
                stash_bytes=Bytes(cost.stash_bytes),
                narrow=narrows[index],
                halves=cost.halves,
                workspace_bytes=Bytes(cost.scratch_bytes),
                frozen=span[1] <= first,
            )
        )
    return tuple(specs)


def _movable(cost: _Cost) -> Bytes | None:
    found = cost.rehearsal.movable_bytes
    return None if found is None else Bytes(found)


def _measure_narrow(
    chain: Chain,
    batch: Batch,
    ranges: Ranges,
    how: _How,
    names: Collection[str],
    sums: bool,
) -> list[Narrow | None]:
    """What each range costs with the named weights in bfloat16; nothing where there are none."""
    if not names:
        return [None] * len(ranges)
    with narrowed(chain.model, names, sums=sums):
        how = replace(how, halves=False, cast=() if sums else names)
        costs = _measure(chain, batch, ranges, how)
        return [
            Narrow(
                parameter_bytes=_parameter_bytes(chain, owned),
                gradient_bytes=_gradient_bytes(chain, owned),
                forward_peak_bytes=Bytes(cost.forward_peak_bytes),
                backward_peak_bytes=Bytes(cost.backward_peak_bytes),
                saved_bytes=Bytes(cost.saved_bytes),
                saved_output_bytes=Bytes(cost.saved_output_bytes),
                saving_peak_bytes=Bytes(cost.saving_peak_bytes),
                movable_bytes=_movable(cost),
                forward_s=Seconds(cost.forward_s),
                backward_s=Seconds(cost.backward_s),
            )
            for span, cost in zip(ranges, costs, strict=True)
            for owned in [[n for layer in range(*span) for n in chain.parameters_of(layer)]]
        ]


def trained_from(chain: Chain) -> int:
    """The first layer that a backward comes to, where those before it have frozen parameters.

    What only shapes or scales a batch is not called frozen.
    """
    needing = min((wire.layer for wire in chain.record.needs_grad), default=chain.num_layers)
    found = False
    for layer in range(needing):
        names = (*chain.parameters_of(layer), *chain.borrowed_by(layer))
        if any(chain.model.get_parameter(name).requires_grad for name in names):
            return layer if found else 0
        found |= bool(names)
    return needing if found else 0


def _gradient_bytes(chain: Chain, owned: Iterable[str]) -> Bytes:
    """Of trained parameters, which may be of another type than their gradients."""
    trained = [p for p in map(chain.model.get_parameter, owned) if p.requires_grad]
    sizes = (p.numel() * (p.grad_dtype or p.dtype).itemsize for p in trained)
    return Bytes(sum(round_up(size, ALIGNMENT) for size in sizes))


def _measure(chain: Chain, batch: Batch, ranges: Ranges, how: _How) -> list[_Cost]:
    """The cost of each range, in order; of ranges that are alike the first is measured."""
    with preserved(chain.model, chain.device, guard_parameters=False):
        micro = chain.begin(clone_batch(batch))
        kinds, forwards, visits = _measure_forwards(chain, micro, ranges, how)
        measured: dict[Hashable, _Cost] = {}
        for span, kind in zip(ranges, kinds, strict=True):
            if kind not in measured:
                after = _stand_in_result(chain, span[1], visits)
                with how.there(*span):
                    measured[kind] = _measure_backward(
                        chain, micro, span, visits[span[0]], after, forwards[kind], how
                    )
        private = [0]
        made: Wires = {}
        for before, here in itertools.pairwise(ranges):
            made |= visits[here[0]].wires
            left = visits[here[1]].wires if here[1] in visits else {}
            wires = private_wires(chain, micro, before, here, made | left)
            private.append(_storage_bytes(wires.values()))
    boundaries = [0, *(measured[kind].boundary_bytes for kind in kinds)]
    return [
        replace(measured[kind], private_bytes=min(size, boundary))
        for kind, size, boundary in zip(kinds, private, boundaries[:-1], strict=True)
    ]


def private_wires(
    chain: Chain, micro: Micro, before: tuple[int, int], here: tuple[int, int], wires: Wires
) -> Wires:
    """Of the wires from the range ``before`` into ``here``, those that no later range reads.

    Only tensors with a storage of their own, which the batch, a buffer or another wire of
    ``wires`` does not share: the others would not be freed by moving them. Before ``here`` has
    run, what its sections read is known of the pilot's batch only.
    """
    start, stop = here
    later: set[Wire] = set()
    if stop < chain.num_layers:
        later = {*chain.live_wires(stop), *chain.live_wires(stop, micro)}
    others = (*tensors_of(micro.batch), *chain.model.buffers())
    owners = Counter(storage_key(t) for t in (*wires.values(), *others))
    return {
        wire: wires[wire]
        for wire in chain.live_wires(start, micro)
        if wire.layer >= before[0]
        and wire not in later
        and owners[storage_key(wires[wire])] == 1
        and _fills_its_storage(wires[wire])
    }


def may_hold(chain: Chain, span: tuple[int, int]) -> bool:
    """Whether a range's forward can wait for its backward with all that it saved.

    Not where what it reads in place may be changed meanwhile: parameters that a forward writes
    to, buffers that other layers change too; and the last range has no forward of its own.
    """
    here = range(*span)
    others = (layer for layer in range(chain.num_layers) if layer not in here)
    shared = _changing(chain, here) & _changing(chain, others)
    written = any(chain.written_parameters(layer) for layer in here)
    return span[1] < chain.num_layers and not written and not shared


def written_parameters(chain: Chain) -> tuple[str, ...]:
    """Parameters that a forward writes to."""
    every = range(chain.num_layers)
    return tuple(sorted({name for layer in every for name in chain.written_parameters(layer)}))


def written_and_shared(chain: Chain) -> str:
    """Whether a forward writes to a parameter that another layer reads; why that is not cut."""
    borrowed = {n for layer in range(chain.num_layers) for n in chain.borrowed_by(layer)}
    both = sorted(borrowed.intersection(written_parameters(chain)))
    if not both:
        return ""
    return (
        f"a forward writes to {both[0]!r}, as max_norm does, and another layer reads it: its copy "
        "there could be the one of before"
    )


def _changing(chain: Chain, layers: Iterable[int]) -> set[int]:
    """Identities of the buffers that these layers' forwards change."""
    names = {name for layer in layers for name in chain.changing_buffers(layer)}
    return {id(chain.model.get_buffer(name)) for name in names}


def _fills_its_storage(tensor: Tensor) -> bool:
    """Whether a tensor is all that its storage holds, each element once."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return bool(dense) and tensor.untyped_storage().nbytes() == tensor.nbytes


class _Forward(NamedTuple):
    """A range's forward unit. ``left_bytes`` are what stays for later units."""

    left_bytes: int
    peak_bytes: int
    seconds: float
    buffers_bytes: int = 0  # copies of the buffers it changes
    scratch_bytes: int = 0  # of kernels, in the peak


def _measure_forwards(
    chain: Chain, micro: Micro, ranges: Ranges, how: _How
) -> tuple[list[Hashable], dict[Hashable, _Forward], dict[int, Visit]]:
    """Every forward unit once; of each kind the first also under the clock and the tracker.

    The last range's runs as in an evaluation. Returned are the kind of each range, what each
    kind costs, and the visits by the layer that a range starts at.
    """
    kinds: list[Hashable] = []
    costs: dict[Hashable, _Forward] = {}
    visits: dict[int, Visit] = {}
    wires: Wires = {}
    for start, stop in ranges[:-1]:
        unit = functools.partial(run_forward, chain, micro, start, stop, wires)
        with how.there(start, stop):
            visits[start] = open_visit(chain, start, stop, wires)
            made = unit()
            alive = chain.live_wires(stop, micro)
            after = {wire: made[wire] if wire in made else wires[wire] for wire in alive}
            del made
            kinds.append(kind := _kind(chain, micro, (start, stop), wires, after))
            if kind not in costs:
                costs[kind] = _measure_forward(chain, (start, stop), wires, unit, how.timed)
        wires = after
    start, stop = ranges[-1]
    visits[start] = Visit(wires, capture_rng(chain.device))
    with how.there(start, stop):
        with AllocationTracker() as tracker:
            run_evaluation(chain, micro, start, wires)
        seconds = how.timed(lambda: run_evaluation(chain, micro, start, wires))
    kinds.append(kind := (start, stop))  # nobody's but its own
    costs[kind] = _Forward(0, tracker.peak_bytes, seconds, 0, tracker.scratch_bytes)
    return kinds, costs, visits


def _measure_forward(
    chain: Chain, span: tuple[int, int], wires: Wires, unit: Callable[[], Wires], timed: Timed
) -> _Forward:
    seconds = timed(unit)
    with AllocationTracker() as tracker:
        visit = open_visit(chain, *span, wires)
        made = unit()
    buffers = sum(buffer.nbytes for buffer in visit.buffers.values())
    left = tracker.current_bytes - buffers
    made.clear()
    return _Forward(left, tracker.peak_bytes, seconds, buffers, tracker.scratch_bytes)


def _measure_backward(
    chain: Chain,
    micro: Micro,
    span: tuple[int, int],
    visit: Visit,
    after: BackwardResult,
    forward: _Forward,
    how: _How,
) -> _Cost:
    saved_bytes = saved_output_bytes = saving_peak_bytes = 0

    def note_saved(made: Collection[int]) -> None:
        nonlocal saved_bytes, saved_output_bytes, saving_peak_bytes
        saved_bytes = tracker.current_bytes - forward.buffers_bytes  # the recompute's own copies
        saving_peak_bytes = tracker.peak_bytes - forward.buffers_bytes
        saved_output_bytes = sum(s.nbytes() for s in tracker.alive() if s._cdata in made)

    drop_gradients(chain.model)
    with AllocationTracker() as tracker:
        result = recompute(chain, micro, span, visit, after, after_forward=note_saved)
    carry_bytes = _storage_bytes([*result.grads.values(), *result.tied.values()])
    grads = (g for name in how.cast if (g := chain.model.get_parameter(name).grad) is not None)
    norm_bytes = max((4 * grad.numel() for grad in grads), default=0)  # it is taken in float32
    peak_bytes = max(tracker.peak_bytes, tracker.current_bytes + norm_bytes)
    holds = how.rehearses and may_hold(chain, span)
    wanted = outcome(chain, result) if holds else {}
    del result, grads
    drop_gradients(chain.model)
    tried = rehearse(chain, micro, span, visit, after, wanted) if holds else Rehearsal()
    seconds = how.timed(lambda: recompute(chain, micro, span, visit, after))
    drop_gradients(chain.model)
    halves: Halves | None = None
    if how.halves and span[0]:  # for the first layers nobody waits
        halves = measure_halves(chain, micro, span, visit, after, how.timed)
        drop_gradients(chain.model)
    written = [name for layer in range(*span) for name in chain.written_parameters(layer)]
    written_bytes = sum(chain.model.get_parameter(name).nbytes for name in written)
    return _Cost(
        boundary_bytes=forward.left_bytes,
        stash_bytes=forward.buffers_bytes + written_bytes,
        carry_bytes=carry_bytes,
        forward_peak_bytes=forward.peak_bytes + written_bytes,
        saved_bytes=saved_bytes,
        saved_output_bytes=saved_output_bytes,
        saving_peak_bytes=saving_peak_bytes,
        rehearsal=tried,
        backward_peak_bytes=peak_bytes + written_bytes,
        forward_s=forward.seconds,
        backward_s=seconds,
        scratch_bytes=max(forward.scratch_bytes, tracker.scratch_bytes),
        halves=halves,
    )


def _stand_in_result(chain: Chain, boundary: int, visits: Mapping[int, Visit]) -> BackwardResult:
    """What the backward of the shard that starts at ``boundary`` would hand on, drawn at random.

    Not zeros: what a backward reads must be seen in what it makes.
    """
    if boundary == chain.num_layers:
        return BackwardResult()
    draw = torch.Generator(chain.device).manual_seed(0)

    def drawn(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.empty_like(like, dtype=dtype, device=chain.device, requires_grad=False)
        return made.normal_(generator=draw)

    wires = visits[boundary].wires
    grads = {w: drawn(t) for w, t in wires.items() if chain.needs_grad(w)}
    model, casts = chain.model, chain.shared_casts
    across = _tied_across(chain, boundary)
    tied = {name: drawn(model.get_parameter(name).data) for name in across}
    for name in sorted(
        frozenset().union(*casts[:boundary]) & frozenset().union(*casts[boundary:])
    ):
        tied[cast_key(name)] = drawn(model.get_parameter(name).data, torch.bfloat16)
    return BackwardResult(grads=grads, tied=tied)


def _tied_across(chain: Chain, boundary: int) -> list[str]:
    """Trained parameters that layers before ``boundary`` own and later ones borrow."""
    owned = {name for layer in range(boundary) for name in chain.parameters_of(layer)}
    later = range(boundary, chain.num_layers)
    used = dict.fromkeys(name for layer in later for name in chain.borrowed_by(layer))
    return [n for n in used if n in owned and chain.model.get_parameter(n).requires_grad]


def _kind(
    chain: Chain, micro: Micro, span: tuple[int, int], before: Wires, after: Wires
) -> Hashable:
    """Equal for ranges whose units need the same bytes: same modules, same shapes."""
    start, stop = span
    sections = chain.skeleton.sections
    if any(sections.headed_by(layer) is not None for layer in range(start, stop)):
        return span
    positions = [sections.position_of(layer) for layer in range(start, stop)]
    modules = [chain.skeleton.blocks[position].module for position in positions]
    read = chain.read_by(micro, start, stop)
    return (
        tuple(map(repr, modules)),
        tuple((tuple(p.shape), p.requires_grad, p.dtype) for m in modules for p in m.parameters()),
        tuple(_looks(chain, w, t, w in read) for w, t in before.items()),
        tuple(_looks(chain, w, t, w.layer < start) for w, t in after.items()),
        tuple(chain.borrowed_by(layer) for layer in range(start, stop)),
        tuple(_tied_across(chain, start)),
        tuple(_tied_across(chain, stop)),
    )


def _looks(chain: Chain, wire: Wire, tensor: Tensor, flag: bool) -> Hashable:
    shape = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return shape, chain.needs_grad(wire), wire in chain.record.cloned, flag


def faster_of_two(clock: Callable[[], float] = time.perf_counter) -> Timed:
    """Times a unit by the faster of two runs: one may have met another process."""

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(2):
            begin = clock()
            work()
            times.append(clock() - begin)
        return min(times)

    return seconds


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    storages = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _parameter_bytes(chain: Chain, names: Iterable[str]) -> Bytes:
    sizes = (chain.model.get_parameter(name).nbytes for name in names)
    return Bytes(sum(round_up(size, ALIGNMENT) for size in sizes))
