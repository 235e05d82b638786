"""Aids for tests, without torch: a clock to turn, devices, layers, shards, measures and jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.core.plan import Job
from shoal.core.spec import DeviceSpec, JobMeasure, LayerMeasure, ShardSpec
from shoal.core.technique import Resident
from shoal.core.units import Bytes, Seconds


class ManualClock:
    """A ``Clock`` that a test turns; ``sleep`` only moves the hand."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Turn the clock forward."""
        if seconds < 0:
            raise ValueError(f"a clock does not go back, got {seconds} seconds")
        self._now += seconds

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)


def make_device(name: str = "cpu:0", memory: int = 2**28, **changes: Any) -> DeviceSpec:
    """A virtual device, 256 MiB unless told otherwise."""
    return DeviceSpec(name=name, kind="virtual", memory=Bytes(memory), **changes)


def make_layer(name: str = "layer", parameter_bytes: int = 1024, **changes: Any) -> LayerMeasure:
    """A layer's measurement; what is not given follows from its parameters, Adam's sizes."""
    size = Bytes(parameter_bytes)
    values: dict[str, Any] = {
        "parameter_bytes": size,
        "state_bytes": Bytes(2 * size),
        "borrowed_bytes": Bytes(0),
        "boundary_bytes": Bytes(256),
        "carry_bytes": Bytes(256),
        "forward_peak_bytes": Bytes(512),
        "saved_bytes": Bytes(512),
        "backward_peak_bytes": Bytes(1024 + size),
        "forward_s": Seconds(0.001),
        "backward_s": Seconds(0.003),
        "step_s": Seconds(0.0005),
    }
    return LayerMeasure(name=name, **(values | changes))


def make_shard(index: int = 0, parameter_bytes: int = 1024, **changes: Any) -> ShardSpec:
    """A shard of one layer; what is not given follows from its parameters, Adam's sizes."""
    size = Bytes(parameter_bytes)
    values: dict[str, Any] = {
        "layers": (index, index + 1),
        "parameter_bytes": size,
        "owned_bytes": size,
        "state_bytes": Bytes(2 * size),
        "gradient_bytes": size,
        "boundary_bytes": Bytes(256 if index else 0),
        "carry_bytes": Bytes(256 if index else 0),
        "forward_peak_bytes": Bytes(512),
        "backward_peak_bytes": Bytes(1024 + size),
        "step_peak_bytes": Bytes(0),
        "forward_s": Seconds(0.001),
        "backward_s": Seconds(0.003),
        "step_s": Seconds(0.0005),
    }
    return ShardSpec(index=index, **(values | changes))


def make_measure(
    layers: Sequence[LayerMeasure] = (), shards: Sequence[ShardSpec] = (), **changes: Any
) -> JobMeasure:
    """A model that can be cut, of these layers or shards, with nothing beside them."""
    values: dict[str, Any] = {
        "layers": tuple(layers),
        "shards": tuple(shards),
        "batch_bytes": Bytes(1024),
        "buffer_bytes": Bytes(0),
        "resident_bytes": Bytes(0),
        "num_batches": None,
        "valid_scale": 1.0,
        "optimizer": "AdamW",
        "cuttable": True,
        "bitwise": True,
    }
    return JobMeasure(**(values | changes))


def make_job(trial: int = 0, shards: Sequence[ShardSpec] = (), **changes: Any) -> Job:
    """A resident job of one shard unless told otherwise."""
    values: dict[str, Any] = {
        "hp": {"lr": 0.1},
        "seed": trial,
        "technique": Resident(),
        "batch_bytes": Bytes(256),
        "buffer_bytes": Bytes(0),
        "held_bytes": Bytes(4096),
        "unit_bytes": Bytes(2048),
        "peak_bytes": Bytes(4096 + 2048),
        "host_bytes": Bytes(4096),
        "step_s": Seconds(0.01),
        "micro_batches": 1,
        "why": (),
        "numerics": {},
    }
    return Job(trial=trial, shards=tuple(shards) or (make_shard(),), **(values | changes))
