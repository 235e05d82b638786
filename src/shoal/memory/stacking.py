"""The layout of an array: N trials of one layout, their tensors as rows of stacked ones. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from shoal.memory.layout import Segment, TensorSpec, TrialLayout, lay_out


def stacked_layout(layout: TrialLayout, width: int) -> TrialLayout:
    """Where the rows of ``width`` trials of this layout lie, shard by shard; without buffers."""
    owned = [[field.spec.name for field in shard.param.fields] for shard in layout.shards]
    borrowed = [[field.spec.name for _, field in shard.borrowed] for shard in layout.shards]
    parameters: dict[str, TensorSpec] = {}
    grads: dict[str, TensorSpec] = {}
    states: dict[str, list[TensorSpec]] = {}
    for shard in layout.shards:
        parameters |= _stacked(shard.param, width)
        grads |= _stacked(shard.grad, width)
        for field in shard.state.fields:
            states.setdefault(field.spec.name, []).append(stacked_spec(field.spec, width))
    return lay_out(owned, borrowed, parameters, states, (), grads)


def stacked_spec(spec: TensorSpec, width: int) -> TensorSpec:
    """``width`` tensors like this one; a row lies in memory as its tensor does alone."""
    return replace(
        spec,
        shape=(width, *spec.shape),
        stride=(max(1, prod(spec.shape)), *spec.stride),
        num_bytes=width * spec.num_bytes,
    )


def _stacked(segment: Segment, width: int) -> dict[str, TensorSpec]:
    return {field.spec.name: stacked_spec(field.spec, width) for field in segment.fields}
