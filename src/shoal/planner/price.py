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
from operator import mul

from shoal.core.spec import NO_SECONDS, DeviceSpec, ShardSpec
from shoal.core.technique import (
    Spilled,
    Technique,
    as_they_travel,
    kept_heads,
    kept_shards,
    kept_weights,
)
from shoal.core.turns import DEFAULT, rule_of
from shoal.core.units import Bytes, Seconds
from shoal.planner.need import Request, programs
from shoal.program.costs import JobCosts, action_seconds
from shoal.program.ir import Op, kept
from shoal.program.replay import Run, replay

STEPS = 4  # that are replayed; the first one, which finds everything empty, does not count
MIX_STEPS = 8  # of the shortest trial of a mix; more, for its end counts too
LONG_STEPS = 64  # of that, as many as it has, where that is not too much
USUAL_ACTIONS = 40_000  # of a mix, from where on it is: a quarter of a second
MOST_TIMES = 64  # of a mix: the longest trial has so many times these at most
LEAST_STEPS = 4  # of the shortest trial, in programs that are very long
MOST_ACTIONS = 100_000  # of a mix: half a second or so
_WORK = frozenset((Op.F, Op.B, Op.I, Op.W, Op.STEP, Op.SYNC))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What the links carry, in bytes per second, and where an optimizer step is how fast.

    A step was measured in one place; ``device_step`` and ``host_step`` are what it takes in
    each, in times of that. ``source`` says where the links' figures come from, ``steps`` the
    steps'; nothing where there is nothing to say.
    """

    up_bytes_per_s: float
    down_bytes_per_s: float
    device_step: float = 1.0
    host_step: float = 1.0
    source: str = ""
    steps: str = ""

    @property
    def sources(self) -> str:
        """Where all of it comes from, for a plan's text."""
        return " and ".join(words for words in (self.source, self.steps) if words)


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of a device that a step of one trial costs, and how busy the device is then.

    ``work_s`` are those of kernels, copies and host steps one after another.
    """

    step_s: Seconds
    busy: float
    work_s: Seconds = NO_SECONDS

    def on_cores(self, devices: Sequence[DeviceSpec], cores: int) -> Seconds:
        """What a step takes there: ``step_s``, or more where the devices are the host's cores.

        Copies and host steps are hidden by a device that computes beside them, and by cores that
        no device has.
        """
        some = devices[0]
        if some.kind != "virtual" or some.profile or some.link_bytes_per_s:
            return self.step_s
        shared = min(1.0, sum(device.threads for device in devices) / cores)
        return max(self.step_s, Seconds(self.work_s * shared))


def price(
    shards: Sequence[ShardSpec],
    batch: Bytes,
    technique: Spilled,
    request: Request,
    speeds: Speeds,
    active: int,
) -> Price:
    """The price of a resolved technique with ``active`` trials of its kind on a device."""
    one = run_of(shards, batch, technique, request, speeds)

    def seconds(steps: int) -> tuple[float, float, float]:
        runs = [replace(one, steps=steps, trial=trial) for trial in range(active)]
        timeline = replay(runs, keep_spans=False)
        computes_s = timeline.busy_s.get((0, "compute"), 0.0)
        return timeline.makespan_s, computes_s, sum(timeline.busy_s.values())

    (first_s, first_busy_s, first_work_s), (all_s, busy_s, work_s) = seconds(1), seconds(STEPS)
    took_s = max(all_s - first_s, 1e-12)
    times = (STEPS - 1) * active
    return Price(
        step_s=Seconds(took_s / times),
        busy=min(1.0, (busy_s - first_busy_s) / took_s),
        work_s=Seconds((work_s - first_work_s) / times),
    )


def run_of(
    shards: Sequence[ShardSpec],
    batch: Bytes,
    technique: Technique,
    request: Request,
    speeds: Speeds,
) -> Run:
    """A step of a trial, to be replayed with what it takes."""
    step, _ = programs(shards, technique, request)
    costs = JobCosts(
        shards=tuple(
            _stepped(shard, technique, speeds) for shard in as_they_travel(shards, technique)
        ),
        batch_bytes=batch,
        up_bytes_per_s=speeds.up_bytes_per_s,
        down_bytes_per_s=speeds.down_bytes_per_s,
    )
    here = kept(kept_shards(technique), kept_weights(technique), kept_heads(technique))
    return Run(program=step, costs={0: costs}, start=here)


def work_s(run: Run) -> Seconds:
    """What a step keeps the device and the host's memory busy: what trials are ranked by."""
    costs = run.costs[0]
    return Seconds(sum(action_seconds(a, costs) for a in run.program.devices[0] if a.op in _WORK))


def mix_s(runs: Sequence[Run], active: int, rule: str = DEFAULT) -> Seconds:
    """How long a device takes for these trials, so many at a time, in the order of a rule.

    Each runs some of its ``steps``: those with the fewest all of them up to ``LONG_STEPS``, at
    least ``MIX_STEPS``, the others as many times that as they have more, up to ``MOST_TIMES``;
    fewer where that would be very many actions. The longer, the less the end of the mix weighs
    more than it does.
    """
    numbered = [
        replace(run, steps=steps, trial=trial)
        for trial, (run, steps) in enumerate(zip(runs, _some_steps(runs), strict=True))
    ]
    return replay(numbered, policy=rule_of(rule), keep_spans=False, active=active).makespan_s


def _some_steps(runs: Sequence[Run]) -> list[int]:
    """How many steps of each are replayed."""
    fewest = min(run.steps for run in runs)
    lengths = [len(run.program.devices[0]) for run in runs]
    times, steps = MOST_TIMES, max(MIX_STEPS, min(fewest, LONG_STEPS))
    while True:
        found = [round(steps * min(times, run.steps / fewest)) for run in runs]
        actions = sum(map(mul, found, lengths))
        if actions <= USUAL_ACTIONS or (times == 1 and steps == LEAST_STEPS):
            return found
        if steps > MIX_STEPS:
            steps -= 1
        elif actions <= MOST_ACTIONS:
            return found
        elif times > 1:
            times //= 2
        else:
            steps -= 1


def _stepped(shard: ShardSpec, technique: Technique, speeds: Speeds) -> ShardSpec:
    """With the seconds of its step where it steps."""
    on_device = not isinstance(technique, Spilled) or technique.optimizer == "device"
    on_device = on_device or shard.index in kept_shards(technique)
    times = speeds.device_step if on_device else speeds.host_step
    return replace(shard, step_s=Seconds(shard.step_s * times))
