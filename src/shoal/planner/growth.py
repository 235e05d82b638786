"""What a model costs when a batch takes more than the one that was measured. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from shoal.core.spec import Halves, JobMeasure, LayerMeasure, Narrow, ReplicaMeasure, ShardSpec
from shoal.core.units import Bytes


def grown(measure: JobMeasure, growth: float) -> JobMeasure:
    """``measure`` for batches that take ``growth`` times the bytes; validation stays as it is."""
    if growth == 1.0:
        return measure
    whole = measure.shards[0]
    return replace(
        measure,
        layers=tuple(_grown_layer(layer, growth) for layer in measure.layers),
        shards=tuple(grown_shard(shard, growth) for shard in measure.shards),
        batch_bytes=_times(measure.batch_bytes, growth),
        draw_bytes=_times(measure.draw_bytes, growth),
        resident_bytes=Bytes(
            measure.resident_bytes + _times(whole.backward_peak_bytes, growth - 1.0)
        ),
        valid_scale=measure.valid_scale / growth,
        replica=_grown_replica(measure.replica, growth),
    )


def _grown_replica(replica: ReplicaMeasure | None, growth: float) -> ReplicaMeasure | None:
    if replica is None:
        return None
    unit, shard = _times(replica.unit_bytes, growth), grown_shard(replica.shard, growth)
    return replace(replica, unit_bytes=unit, shard=shard)


def _grown_layer(layer: LayerMeasure, growth: float) -> LayerMeasure:
    return replace(
        layer,
        boundary_bytes=_times(layer.boundary_bytes, growth),
        private_bytes=Bytes(int(layer.private_bytes * growth)),
        carry_bytes=_times(layer.carry_bytes, growth),
        forward_peak_bytes=_times(layer.forward_peak_bytes, growth),
        saved_bytes=_times(layer.saved_bytes, growth),
        backward_peak_bytes=_times(layer.backward_peak_bytes, growth),
        narrow=_grown_narrow(layer.narrow, growth),
        halves=_grown_halves(layer.halves, growth),
    )


def grown_shard(shard: ShardSpec, growth: float) -> ShardSpec:
    """A shard for such batches."""
    return replace(
        shard,
        boundary_bytes=_times(shard.boundary_bytes, growth),
        private_bytes=Bytes(int(shard.private_bytes * growth)),
        saved_output_bytes=Bytes(int(shard.saved_output_bytes * growth)),
        saving_peak_bytes=_times(shard.saving_peak_bytes, growth),
        movable_bytes=_movable(shard.movable_bytes, growth),
        saved_bytes=None if shard.saved_bytes is None else _times(shard.saved_bytes, growth),
        carry_bytes=_times(shard.carry_bytes, growth),
        forward_peak_bytes=_times(shard.forward_peak_bytes, growth),
        backward_peak_bytes=_times(shard.backward_peak_bytes, growth),
        narrow=_grown_narrow(shard.narrow, growth),
        halves=_grown_halves(shard.halves, growth),
        workspace_bytes=_times(shard.workspace_bytes, growth),
    )


def _grown_narrow(narrow: Narrow | None, growth: float) -> Narrow | None:
    if narrow is None:
        return None
    return replace(
        narrow,
        saved_output_bytes=Bytes(int(narrow.saved_output_bytes * growth)),
        saving_peak_bytes=_times(narrow.saving_peak_bytes, growth),
        movable_bytes=_movable(narrow.movable_bytes, growth),
        saved_bytes=_times(narrow.saved_bytes, growth),
        forward_peak_bytes=_times(narrow.forward_peak_bytes, growth),
        backward_peak_bytes=_times(narrow.backward_peak_bytes, growth),
    )


def _grown_halves(halves: Halves | None, growth: float) -> Halves | None:
    if halves is None:
        return None
    return replace(
        halves,
        left_bytes=_times(halves.left_bytes, growth),
        first_peak_bytes=_times(halves.first_peak_bytes, growth),
        second_peak_bytes=_times(halves.second_peak_bytes, growth),
        making_peak_bytes=_times(halves.making_peak_bytes, growth),
    )


def _movable(size: Bytes | None, growth: float) -> Bytes | None:
    return None if size is None else Bytes(int(size * growth))  # no more than what is saved


def _times(size: Bytes, growth: float) -> Bytes:
    return Bytes(ceil(size * growth))
