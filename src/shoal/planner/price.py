"""How long a step takes: the program replayed with measured seconds and the links' speeds.

[Note: the price of a choice]
Several trials of the same kind share the device, each in a program of its own. What is asked
is the time that a step of one of them costs when all run for long: copies and host steps
count where nothing hides them, the same choice may be the best on one machine and the worst
on another, and a second trial on the device is worth the memory it takes or it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.core.plan import Spilled, kept_shards, kept_weights
from shoal.core.spec import ShardSpec
from shoal.core.units import Bytes, Seconds
from shoal.planner.need import Request, programs
from shoal.program.costs import JobCosts
from shoal.program.ir import kept
from shoal.program.replay import Run, replay

STEPS = 4  # that are replayed; the first one, which finds everything empty, does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What the links carry, in bytes per second, and where an optimizer step is how fast.

    A step was measured in one place; ``device_step`` and ``host_step`` are what it takes in
    each, in times of that. ``source`` says where these come from.
    """

    up_bytes_per_s: float
    down_bytes_per_s: float
    device_step: float = 1.0
    host_step: float = 1.0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of a device that a step of one trial costs, and how busy the device is then."""

    step_s: Seconds
    busy: float


def price(
    shards: Sequence[ShardSpec],
    batch: Bytes,
    technique: Spilled,
    request: Request,
    speeds: Speeds,
    active: int,
) -> Price:
    """The price of a resolved technique with ``active`` trials of its kind on a device."""
    step, _ = programs(len(shards), technique, request)
    costs = JobCosts(
        shards=tuple(_stepped(shard, technique, speeds) for shard in shards),
        batch_bytes=batch,
        up_bytes_per_s=speeds.up_bytes_per_s,
        down_bytes_per_s=speeds.down_bytes_per_s,
    )
    here = kept(kept_shards(technique), kept_weights(technique))

    def makespan_s(steps: int) -> tuple[float, float]:
        runs = [
            Run(program=step, costs={0: costs}, steps=steps, start=here, trial=trial)
            for trial in range(active)
        ]
        timeline = replay(runs, keep_spans=False)
        return timeline.makespan_s, timeline.busy_s.get((0, "compute"), 0.0)

    (first_s, first_busy_s), (all_s, busy_s) = makespan_s(1), makespan_s(STEPS)
    took_s = max(all_s - first_s, 1e-12)
    return Price(
        Seconds(took_s / (STEPS - 1) / active), min(1.0, (busy_s - first_busy_s) / took_s)
    )


def _stepped(shard: ShardSpec, technique: Spilled, speeds: Speeds) -> ShardSpec:
    """With the seconds of its step where it steps."""
    on_device = technique.optimizer == "device" or shard.index in kept_shards(technique)
    times = speeds.device_step if on_device else speeds.host_step
    return replace(shard, step_s=Seconds(shard.step_s * times))
