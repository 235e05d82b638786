"""Into which groups of its tensors a shard's step on the host is cut. Pure.

[Note: chunks]
A step on the host cannot be interrupted, so whoever needs the host's memory more urgently waits
until it is over. Cut into chunks, the optimizer steps some of the shard's tensors at a time, and
between two chunks the turn goes to whose step is most urgent:

    shard of trial A    | chunk | chunk |       | chunk | chunk |
    shard of trial B            ^ ready |  all  |

Chunks are whole tensors, in the order in which they lie: no tensor is cut, since its state may be
about all of it (a norm, a count). Those that are frozen take no time and count nothing.

What a chunk costs is one more call of ``step()``, 0.02 to 0.07 ms of Python; what it gives is that
nobody waits for more than ``CHUNK_S``, or for the largest tensor. So a chunk is a length of time,
whatever a host makes of bytes: a hundred times its cost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from shoal.core.spec import ALIGNMENT, JobMeasure, ShardSpec
from shoal.core.units import Bytes, round_up
from shoal.memory.layout import ShardLayout, TrialLayout

CHUNK_S = 0.01
"""What a chunk takes at most, unless one tensor takes longer."""
SMALL = 0.25  # of a chunk: what is smaller is not worth a call of its own


def in_chunks(measure: JobMeasure, layout: TrialLayout, host_step: float = 1.0) -> JobMeasure:
    """The measure with the chunks of its shards' steps, where these are on the host.

    ``host_step`` is how many times longer a step takes there than where it was measured.
    """
    if not measure.steps_by_tensor:
        return measure
    shards = [
        replace(shard, step_chunks=chunk_bytes(sizes, shard.step_s * host_step))
        for shard, own in zip(measure.shards, layout.shards, strict=True)
        for sizes in [_sizes(own, measure.trained)]
    ]
    return replace(measure, shards=tuple(shards))


def chunk_bytes(sizes: Sequence[int], seconds: float) -> tuple[Bytes, ...]:
    """The bytes of consecutive groups of tensors of these ``sizes``; () for one group of all.

    ``seconds`` are those of all, shared out by bytes. No group takes longer than
    (1 + ``SMALL``) ``CHUNK_S``, or than its largest tensor and ``SMALL`` of that.
    """
    if seconds <= CHUNK_S or not sum(sizes):
        return ()
    most = CHUNK_S / seconds * sum(sizes)
    found, largest = [0], 0
    for size in sizes:
        largest, together = max(largest, size), found[-1] + size
        is_small = min(found[-1], size) < SMALL * most
        if together <= most or (is_small and together <= (1 + SMALL) * max(most, largest)):
            found[-1] = together
        else:
            found.append(size)
            largest = size
    chunks = tuple(Bytes(num_bytes) for num_bytes in found if num_bytes)
    return chunks if len(chunks) > 1 else ()


def chunk_names(
    shard: ShardSpec, layout: ShardLayout, trained: Collection[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """The parameters of each chunk; one of all where the chunks are not of this layout.

    ``trained`` are those that count, all where none is named; others are of the chunk beside them.
    """
    names = [field.spec.name for field in layout.param.fields]
    found: list[tuple[str, ...]] = []
    sizes, at = _sizes(layout, trained), 0
    for num_bytes in shard.step_chunks:
        stop, filled = at, 0
        while stop < len(sizes) and filled < num_bytes:
            filled += sizes[stop]
            stop += 1
        if filled != num_bytes:
            return (tuple(names),)
        while stop < len(sizes) and not sizes[stop]:
            stop += 1
        found.append(tuple(names[at:stop]))
        at = stop
    return tuple(found) if at == len(names) else (tuple(names),)


def _sizes(layout: ShardLayout, trained: Collection[str]) -> list[int]:
    return [
        round_up(spec.num_bytes, ALIGNMENT) if not trained or spec.name in trained else 0
        for spec in (field.spec for field in layout.param.fields)
    ]
