"""What to try when a trial runs out of memory, in order. Pure.

[Note: the ladder] What was measured was the first batch, and a later one took ``growth`` times
as much. So the next plan is for batches that take so much, whatever is measured: the first of
these that fits is the trial's next job, and each time the growth is larger than before.

    as it is, alone            where it shared its device: fewer neighbours, and of its own
                               shards fewer that stay on the device, and no activations
    no longer captured         what passes are compared with, or a graph's memory, is not needed
    no lookahead               where it had some: one slot instead of two
    boundaries on the host     what enters a shard waits there between forward and backward
    spilled, as many shards as it takes

Of a pipeline, forwards run again in the backward, then its stages are spilled; spilled ones keep
less, load nothing ahead, and have more shards. Of replicas, FSDP2 for DDP.

No rung changes the numerics key: the optimizer steps where it did, micro-batches stay as they
are, and how many shards there are is placement. Where a step on the host has other bits than one
on the device, what is not kept on the device with its step would step elsewhere: there all rungs
keep what was kept, or nothing (``at_its_place``).

A pipeline one of whose devices is gone has ``fewer_stages``; where shards that stay step on their
device and others on the host, these are put together of the same shards (``over_fewer``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from shoal.core.plan import BITWISE, Job
from shoal.core.spec import Place, Scalar
from shoal.core.technique import (
    SPILLING,
    Captured,
    DataParallel,
    Pipelined,
    Resident,
    Spilled,
    Technique,
    kept_shards,
    spans_of,
    steps_on_host,
)
from shoal.spill.generate import Route

LEAST_GROWTH = 1.25
"""Each rung plans for at least so many times what the one before was planned for."""
MAX_RUNGS = 8
_NO_KEY = {"cut", "array_group", "array_batches", "array_base"}
"""How the pilot compared a chain, which then has the same bits; what a shape is called, of which
kind its batches are, and which frozen weights its trials have."""


def grow(growth: float, by: float) -> float:
    """What to plan for next, when ``by`` times what was planned for came."""
    return growth * max(by, LEAST_GROWTH)


def techniques(
    technique: Technique, shards: int, place: Place, *, has_neighbours: bool
) -> Iterator[Technique]:
    """What may be tried, in order; whether it fits is the planner's to find.

    Args:
        technique: What just failed.
        shards: How many shards it had.
        place: Where the optimizer steps; it goes on stepping there.
        has_neighbours: Other trials may have held the memory that was missing.
    """
    if isinstance(technique, Resident):
        if has_neighbours:
            yield technique
        if isinstance(technique, Captured):
            yield Resident()
        yield Spilled(optimizer=place, recompute=True)
        return
    if isinstance(technique, DataParallel):
        if not technique.shard:
            yield replace(technique, shard=True)
        return
    if isinstance(technique, Pipelined):
        if has_neighbours:
            yield technique
        if technique.is_spilled:
            yield from _less_there(technique)
            return
        if not technique.recompute:
            yield replace(technique, recompute=True)
        if technique.known_schedule in SPILLING and technique.width == 1:
            yield replace(technique, cuts=None, recompute=None, optimizer=place)
        return
    by_shard = technique.order == "shard"  # which holds more inputs, and may not be so any more
    same = replace(
        technique,
        shards=shards,
        optimizer=place,
        order=None if by_shard else technique.order,
        lookbehind=None,
        keep_turn=None,
        keep_gradients=None,
        keep_head=None,
        recompute=True,
        keep_activations=(),
        spill_activations=(),
    )
    late = False if technique.late_state is False else None  # what was forbidden stays so
    fewer_kept = replace(same, keep=None, keep_weights=(), late_state=late)
    stays = technique.keep or technique.keep_weights or technique.keep_activations
    if has_neighbours or stays or technique.spill_activations:
        yield fewer_kept
    if technique.lookahead != 0:
        yield replace(fewer_kept, lookahead=0)
        if technique.keep:  # which shards step on the device may be part of the numerics
            yield replace(same, lookahead=0)
    if technique.boundaries != "host" and Route(shards, lookahead=0, boundaries="host").away:
        yield replace(fewer_kept, lookahead=0, boundaries="host")
        if technique.keep:
            yield replace(same, lookahead=0, boundaries="host")
    yield replace(fewer_kept, shards=None, lookahead=0, boundaries=None)


def _open(technique: Pipelined) -> Pipelined:
    """Spilled stages that step where they did; all else is the planner's to say again."""
    open_ = replace(technique, keep=None, keep_gradients=None, recompute=None)
    return replace(open_, shards=None, cuts=None, lookahead=None)


def _less_there(technique: Pipelined) -> Iterator[Technique]:
    """Spilled stages with less on their devices at a time."""
    same = replace(technique, keep=None, keep_gradients=None, recompute=True)
    if same != technique:
        yield same
    if technique.lookahead:
        yield replace(same, lookahead=0)
    yield replace(_open(technique), lookahead=0, recompute=True)


def fewer_stages(technique: Pipelined, devices: int, accumulate: int) -> Iterator[Technique]:
    """What a pipeline may go on as with so many devices, in order; all train to its bits.

    Args:
        technique: What it has been, for more devices.
        accumulate: Batches of a step; pieces of them are no plain loop's micro-batches.
    """
    recompute = technique.recompute or None  # what fitted in more stages may not in fewer
    if technique.is_spilled:
        technique = _open(technique)
    for stages in range(devices // technique.width, 1, -1):
        yield replace(technique, stages=stages, cuts=None, recompute=recompute)
    is_alone = technique.width == 1 and not technique.is_stale
    if devices and is_alone and technique.micro_batches in (None, accumulate):
        yield Resident()
        yield Spilled(optimizer="device")
        yield Spilled(optimizer="host")


def over_fewer(job: Job, devices: int, accumulate: int) -> Iterator[Technique]:
    """What a pipeline's job may go on as with so many devices, each parameter stepping as now."""
    technique = job.technique
    assert isinstance(technique, Pipelined)
    options = fewer_stages(technique, devices, accumulate)
    if not has_both_places(job):
        yield from at_its_place(options, job)
        return
    kept, shards = kept_shards(technique), len(job.shards)
    for option in filter(steps_on_host, options):
        if isinstance(option, Pipelined):
            yield replace(option, shards=shards, keep=kept, cuts=_merged(job, option.stages or 1))
        elif isinstance(option, Spilled):
            yield replace(option, shards=shards, keep=kept)


def _merged(job: Job, stages: int) -> tuple[int, ...]:
    """The cuts that are left when neighbours are put together, with few shards in each stage."""
    technique = job.technique
    assert isinstance(technique, Pipelined)
    spans = spans_of(technique, job.shards)
    sizes = [stop - start for start, stop in spans]
    starts = [job.shards[start].layers[0] for start, _ in spans]

    def most(edges: Sequence[int]) -> int:
        groups = itertools.pairwise((0, *edges, len(sizes)))
        return max(sum(sizes[start:stop]) for start, stop in groups)

    chosen = min(itertools.combinations(range(1, len(sizes)), stages - 1), key=most)
    return tuple(starts[edge] for edge in chosen)


def same_bits(before: Mapping[str, Scalar], after: Mapping[str, Scalar]) -> bool:
    """Whether two numerics keys promise the same bits."""
    return bits_of(before) == bits_of(after)


def bits_of(key: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """What of a numerics key may change bits.

    Key-value caches that were switched off to cut a model do not, where the pilot found the bits
    of the model that has them on.
    """
    left_out = _NO_KEY | ({"use_cache"} if key.get("cut") == BITWISE else set())
    return {name: value for name, value in key.items() if name not in left_out}


def place_matters(numerics: Mapping[str, Scalar]) -> bool:
    """Whether a step on the host has other bits than one on the device: not on CPUs alone."""
    return numerics.get("optimizer_place") not in (None, "cpu")


def at_its_place(options: Iterable[Technique], job: Job) -> Iterator[Technique]:
    """Those of the rungs that step every parameter of a job where it steps now."""
    if not place_matters(job.numerics):
        yield from options
        return
    seen: set[Technique] = set()
    for option in options:
        if steps_on_host(option) != steps_on_host(job.technique):
            continue
        settled = _keeping_as(option, job)
        if settled is not None and settled not in seen:
            seen.add(settled)
            yield settled


def _keeping_as(option: Technique, job: Job) -> Technique | None:
    """An option that keeps the shards that step on the device; None: it has other shards."""
    before = job.technique
    if not steps_on_host(before):
        return option
    assert isinstance(option, Spilled | Pipelined)
    kept, cut = kept_shards(before), (len(job.shards), *_stages_of(before))
    if kept and (option.shards, *_stages_of(option)) != cut:
        return None
    return replace(option, keep=kept)


def _stages_of(technique: Technique) -> tuple[object, ...]:
    return (technique.stages, technique.cuts) if isinstance(technique, Pipelined) else ()


def stepped_here(job: Job) -> frozenset[int]:
    """The layers that a job steps on the device while the others are stepped on the host."""
    if not steps_on_host(job.technique):
        return frozenset()
    kept = [job.shards[shard] for shard in kept_shards(job.technique)]
    return frozenset(layer for shard in kept for layer in range(*shard.layers))


def steps_alike(before: Job, after: Job) -> bool:
    """Whether every parameter is stepped where it was, as far as that changes bits."""
    return not place_matters(before.numerics) or stepped_here(before) == stepped_here(after)


def has_both_places(job: Job) -> bool:
    """Whether some parameters step on the device and others on the host, with other bits there."""
    technique = job.technique
    is_mixed = steps_on_host(technique) and bool(kept_shards(technique))
    return is_mixed and place_matters(job.numerics)


def nothing_smaller(job: Job) -> str:
    """The words for that no rung is left."""
    if not has_both_places(job):
        return "there is nothing smaller to try."
    named = "+".join(map(str, kept_shards(job.technique)))
    return (
        f"of its {len(job.shards)} shards {named} stay on the device and step there, the others "
        "on the host. That is part of its numerics key, and nothing that needs less leaves it so. "
        "Train it with keep=(), or with optimizer='device'."
    )
