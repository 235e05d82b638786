"""The layout of an array: N trials of one layout, their tensors as rows of stacked ones. Pure.

Where the trials have one base (``planning/based.py``) its tensors are there once: a block whose
rows all lie in the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod

from shoal.core import arraykeys
from shoal.memory.layout import Segment, ShardLayout, TensorSpec, TrialLayout, lay_out

ROWS_APART = 2
"""Times what a batch of all slots leaves: some may run by themselves, beside the others."""


def most_micro_batches(accumulate: int, *, varies: bool) -> int:
    """Of a step, for whose sums of gradients there is room: one or several is all that matters.

    ``varies``: batches vary in length, so that one of a step may be several.
    """
    return max(2, accumulate) if varies else accumulate


def stacked_layout(layout: TrialLayout, width: int, *, one_base: bool = False) -> TrialLayout:
    """Where the rows of ``width`` trials of this layout lie, shard by shard; without buffers."""
    owned = [[field.spec.name for field in shard.param.fields] for shard in layout.shards]
    borrowed = [[field.spec.name for _, field in shard.borrowed] for shard in layout.shards]
    parameters: dict[str, TensorSpec] = {}
    grads: dict[str, TensorSpec] = {}
    states: dict[str, list[TensorSpec]] = {}
    for shard in layout.shards:
        parameters |= _stacked(shard.param, width, base_of(shard) if one_base else ())
        grads |= _stacked(shard.grad, width)
        for field in shard.state.fields:
            states.setdefault(field.spec.name, []).append(stacked_spec(field.spec, width))
    return lay_out(owned, borrowed, parameters, states, (), grads)


def base_of(shard: ShardLayout) -> frozenset[str]:
    """What of a shard's own parameters an array of one base has once: not small, and frozen."""
    trained = {field.spec.name for field in shard.grad.fields}
    return frozenset(
        field.spec.name
        for field in shard.param.fields
        if field.spec.name not in trained and field.spec.num_bytes >= arraykeys.LEAST_BASE_BYTES
    )


def stacked_spec(spec: TensorSpec, width: int) -> TensorSpec:
    """``width`` tensors like this one; a row lies in memory as its tensor does alone."""
    return replace(
        spec,
        shape=(width, *spec.shape),
        stride=(max(1, prod(spec.shape)), *spec.stride),
        num_bytes=width * spec.num_bytes,
    )


def shared_spec(spec: TensorSpec, width: int) -> TensorSpec:
    """``width`` rows that are all this one tensor."""
    return replace(spec, shape=(width, *spec.shape), stride=(0, *spec.stride))


def _stacked(segment: Segment, width: int, once: Collection[str] = ()) -> dict[str, TensorSpec]:
    specs = [field.spec for field in segment.fields]
    return {
        spec.name: (shared_spec if spec.name in once else stacked_spec)(spec, width)
        for spec in specs
    }
