"""What a step of a pipeline takes, by replay: its messages, its sums, and where it stops.

[Note: what a stop takes]
With "2bw" steps overlap, and at a stop the pipeline runs empty and fills again (``pipeline.stops``
says when). Two programs of two steps take so much longer than one of four. With several trials on
the same devices the others compute meanwhile, and the replay knows that. Schedules that flush are
empty after each step.

[Note: what a sum takes]
With copies a stage's gradients go to the others as messages of the replay. That it adds theirs to
its own is memory that is read and written, as its step is: two gradients are read and one is
written, with the bytes a second that the step was measured to have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import NamedTuple

from shoal.core.spec import NO_SECONDS, JobMeasure, ShardSpec
from shoal.core.technique import Pipelined
from shoal.core.units import Bytes, Seconds
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.stops import Stops
from shoal.planner.need import Request
from shoal.planner.price import Speeds
from shoal.planner.stages import Split
from shoal.program.costs import JobCosts, moved_bytes
from shoal.program.ir import Action, Op
from shoal.program.replay import Run, replay

MESSAGE_S = 2e-4  # to pack a message, wake who waits for it, and unpack it
MESSAGE_BYTES_PER_S = 1e9  # between two processes of a machine, through its memory
MOST_MICROS = 24  # of a step that is replayed, or two a stage; longer ones go on as its end does


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What candidates have in common: the measure, and what the study asks of a step.

    ``shortest`` is how many batches the shortest step has: of the last of an epoch, maybe.
    ``stops`` is where trials stop; None: that is not priced.
    """

    measure: JobMeasure
    request: Request
    speeds: Speeds
    casts: bool = False  # the model computes with copies of its weights
    shortest: int | None = None
    stops: Stops | None = None

    def split(self, micro_batches: int) -> Split:
        return Split(pieces=micro_batches // self.request.micro_batches, casts=self.casts)

    def batch(self, micro_batches: int) -> Bytes:
        """Bytes of a micro-batch."""
        return self.split(micro_batches).of(self.measure.batch_bytes)

    def stops_a_step(self, step_s: float) -> float:
        """How many times a pipeline whose steps overlap runs empty, for each of its steps."""
        if self.stops is None:
            return 0.0
        batches, accumulate = self.measure.num_batches, self.request.micro_batches
        return self.stops.per_step(step_s, ceil(batches / accumulate) if batches else None)


def pipeline_of(
    technique: Pipelined,
    stages: Sequence[ShardSpec],
    terms: Terms,
    groups: tuple[int, ...],
    ties: tuple[tuple[int, int], ...] = (),
) -> Pipeline:
    """The program's parameters, for so many steps as there are ``groups``."""
    tied = {stage for pair in ties for stage in pair}
    changed = {s.index for s in stages if s.stash_bytes and technique.recompute}
    return Pipeline(
        schedule=technique.known_schedule,
        stages=technique.stages or 1,
        groups=groups,
        recompute=bool(technique.recompute),
        lag=technique.lag or 0,
        clip=terms.request.clip,
        ties=ties,
        draws=terms.measure.draws,
        foretold=terms.measure.draws,
        whole=tuple(sorted(tied | changed)),
        width=technique.width,
    )


class StepTime(NamedTuple):
    """Seconds of a step in the middle of a training, with its part of the stops.

    ``bubbles`` is the part of its devices' time in which none of its stages computes. ``stops`` is
    how many stops it has, and ``stops_s`` what they take of it.
    """

    step_s: Seconds
    bubbles: float
    stops: float = 0.0
    stops_s: Seconds = NO_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps of a resolved technique on paper, with so many trials of its kind on the devices."""

    technique: Pipelined
    stages: Sequence[ShardSpec]
    ties: tuple[tuple[int, int], ...]
    batch: Bytes
    terms: Terms
    together: int = 1
    _known: dict[tuple[int, int, int], tuple[float, float]] = field(
        default_factory=dict, init=False, compare=False
    )

    def replayed(self) -> StepTime:
        """The seconds of a step of one of them."""
        technique = self.technique
        micros = technique.micro_batches or 1
        some = min(micros, technique.width * max(MOST_MICROS, 2 * len(self.stages)))
        step_s, busy_s = lengthened(self._steady, some, micros)
        return self._with_stops(max(step_s, 1e-6), busy_s, some)

    def _with_stops(self, step_s: float, busy_s: float, micros: int) -> StepTime:
        """A step's part of the stops is added; there are more of them where it is longer."""
        stops = stop_s = 0.0
        if self.technique.is_stale and self.terms.stops is not None:
            stop_s = self._stop_s(micros)
            stops = self.terms.stops_a_step(step_s)
            stops = self.terms.stops_a_step(step_s + stops * stop_s)
        all_s = step_s + stops * stop_s
        bubbles = 1.0 - busy_s / (len(self.stages) * self.technique.width * all_s)
        bubbles = min(max(bubbles, 0.0), 1.0)
        return StepTime(Seconds(all_s), bubbles, stops, Seconds(stops * stop_s))

    def _steady(self, micros: int) -> tuple[float, float]:
        """Seconds of a step with so many micro-batches, and those in which its devices compute."""
        overlaps = self.technique.is_stale or self.together > 1
        few, many = (2, 4) if overlaps else (1, 2)
        (first_s, first_busy_s), (all_s, all_busy_s) = (
            self._ran(micros, few),
            self._ran(micros, many),
        )
        steps = (many - few) * self.together
        return (all_s - first_s) / steps, (all_busy_s - first_busy_s) / steps

    def _stop_s(self, micros: int) -> float:
        """What a stop takes, of each of them at once: see [Note: what a stop takes]."""
        stopped_s, _ = self._ran(micros, 2, programs=2)
        all_s, _ = self._ran(micros, 4)
        return max(0.0, stopped_s - all_s) / self.together

    def _ran(self, micros: int, steps: int, programs: int = 1) -> tuple[float, float]:
        """Until all of them have done so many steps, and what devices computed of that.

        Of several programs one begins when the first stage is through with the one before.
        """
        key = (micros, steps, programs)
        if key not in self._known:
            self._known[key] = self._replay(micros, steps, programs)
        return self._known[key]

    def _replay(self, micros: int, steps: int, programs: int) -> tuple[float, float]:
        technique, terms = self.technique, self.terms
        groups = (micros,) * steps
        pipeline = pipeline_of(technique, self.stages, terms, groups, self.ties)
        one = JobCosts(shards=tuple(map(self._stepping, self.stages)), batch_bytes=self.batch)
        run = Run(
            program=pipeline.program(),
            costs=dict.fromkeys(range(technique.width), one),
            devices=tuple(range(pipeline.copies.devices)),
            steps=programs,
        )
        timeline = replay(
            [replace(run, trial=trial) for trial in range(self.together)]
            if self.together > 1
            else [run],
            durations=lambda action: _message_s(action, self.stages, self.batch, terms.speeds),
            keep_spans=False,
        )
        computes = [s for (_, stream), s in timeline.busy_s.items() if stream == "compute"]
        return timeline.makespan_s, sum(computes)

    def _stepping(self, stage: ShardSpec) -> ShardSpec:
        """With the seconds of its step where it is, and of the sums before it."""
        step_s = stage.step_s * self.terms.speeds.device_step
        added = 3 * (self.technique.width - 1) * stage.gradient_bytes
        return replace(stage, step_s=Seconds(step_s * (1 + added / max(1, stage.step_bytes))))


def lengthened(
    steady: Callable[[int], tuple[float, float]], some: int, micros: int
) -> tuple[float, float]:
    """Seconds of a step of ``micros``, and those in which devices compute, from shorter steps.

    ``steady`` tells both of so many; it is asked for ``some``, and each that comes after them
    takes what one of their second half does.
    """
    step_s, busy_s = steady(some)
    if some < micros:
        fewer = some // 2
        before_s, busy_before_s = steady(fewer)
        more = (micros - some) / (some - fewer)
        step_s += more * (step_s - before_s)
        busy_s += more * (busy_s - busy_before_s)
    return step_s, busy_s


def _message_s(
    action: Action, stages: Sequence[ShardSpec], batch: Bytes, speeds: Speeds
) -> Seconds | None:
    """How long a message takes from device to device; None of what is none."""
    if action.op is not Op.SEND:
        return None
    size = moved_bytes(action, stages[action.shard])
    if not action.parts:  # activations, with which the batch travels
        size = Bytes(size + batch)
    return Seconds(MESSAGE_S + size * byte_s(speeds))


def byte_s(speeds: Speeds) -> float:
    """Down from one device, through the host's memory, and up to the next."""
    links = (speeds.down_bytes_per_s, MESSAGE_BYTES_PER_S, speeds.up_bytes_per_s)
    return sum(1 / link for link in links if link < inf)
