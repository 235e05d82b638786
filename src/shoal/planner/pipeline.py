"""A pipeline on paper: what each of its stages needs, how long a step takes, which to choose.

[Note: the choice of a pipeline]
For each number of stages, with and without recompute, the cuts come from ``stages.Cutter``. What
a closed formula leaves of these is replayed, with the seconds that were measured and the time
that messages take. What counts is when all trials have done a step, each on as many devices as
it has stages; of candidates that are about as quick the one with the fewest devices is taken.

Layers say what should fit. The stages themselves are measured afterwards, and the same functions
say for them what does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from shoal.core.spec import NO_SECONDS, JobMeasure, ShardSpec
from shoal.core.technique import Pipelined, as_they_travel
from shoal.core.units import Bytes, Seconds
from shoal.memory.layout import TrialLayout
from shoal.pipeline.check import check_pipeline
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.wide import ROUNDS_AHEAD
from shoal.planner.need import Need, Request
from shoal.planner.price import Speeds
from shoal.planner.stages import Cutter, as_stages, drawing_ahead, predicted
from shoal.planner.steptime import MESSAGE_S, Steps, StepTime, Terms, byte_s, pipeline_of
from shoal.program.costs import JobCosts
from shoal.program.footprint import Footprint

RNG_BYTES = 2**14  # of a random state, which travels with each micro-batch: ``packing.pack_rng``
FRAMES_AHEAD = 3  # messages of a line that nobody asked for yet, at most
MOST_REPLAYED = 20
MOST_LARGE = 6  # of those that should not fit, those with the most stages
NEAR = 2.0  # times what the closed formula has as the least, of what is replayed
MARGINS = (1.0, 0.98, 0.95, 0.9, 0.8)
AWAY = 0.02
"""What messages take of a micro-batch's computing that is worth a longer pipeline of them."""
ALIKE = 1.03
"""Candidates that take up to so many times as long as the quickest are as quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A pipeline with all that is known of it. Where it is a choice yet, ``needs`` are guesses.

    Where stages are spilled, ``stages`` are their shards.
    ``step_s``, ``bubbles``, ``stops`` and ``stops_s`` are those of ``steptime.StepTime``.
    """

    technique: Pipelined  # with nothing left open
    stages: tuple[ShardSpec, ...]
    needs: tuple[Need, ...]
    step_s: Seconds
    bubbles: float
    stops: float = 0.0
    stops_s: Seconds = NO_SECONDS

    @property
    def need(self) -> Need:
        """Bytes that are enough on every device: of the neediest stage, for each of them."""
        held = max(need.held for need in self.needs)
        most = max(need.most for need in self.needs)
        peak = max(need.peak for need in self.needs)
        return Need(held=held, unit=Bytes(most - held), peak=peak, moved=Bytes(0))

    @property
    def gang(self) -> int:
        """Devices that it has at a time."""
        return (self.technique.stages or len(self.stages)) * self.technique.width

    @property
    def neediest(self) -> int:
        """The stage that needs the most."""
        return max(range(len(self.needs)), key=lambda stage: self.needs[stage].total)


def candidates(
    asked: Pipelined, terms: Terms, budget: Bytes, devices: int, trials: int
) -> list[Staged]:
    """Pipelines on paper, the best first; those that should not fit are last.

    ``asked`` says what is open. Empty where the model has too few pieces for any.
    """
    quickest = _quickest(asked, terms, budget, devices, trials)
    found = [_on_paper(technique, terms) for technique in quickest]
    fitting = [one for one in found if one.need.total <= budget]
    large = [one for one in found if one.need.total > budget]
    return ranked(fitting, devices, trials) + sorted(large, key=lambda one: one.need.total)


def study_s(staged: Staged, devices: int, trials: int) -> float:
    """Seconds until all trials have done a step, so many pipelines at a time as fit."""
    return _rounds(staged.gang, devices, trials) * staged.step_s


def _rounds(taken: int, devices: int, trials: int) -> int:
    """How many times devices are given out, so many to a trial."""
    return ceil(trials / max(1, devices // taken))


def ranked(found: list[Staged], devices: int, trials: int) -> list[Staged]:
    """The soonest done first, and of those that are about as quick the one with fewer devices."""
    least = min((study_s(one, devices, trials) for one in found), default=0.0)

    def rank(one: Staged) -> tuple[bool, float]:
        seconds = study_s(one, devices, trials)
        alike = seconds <= ALIKE * least
        return (
            not alike,
            _costs(one) if alike else seconds,
        )

    return sorted(found, key=rank)


def _costs(one: Staged) -> float:
    """What takes less of the devices, and of their memory."""
    return one.gang + bool(one.technique.recompute) / 2 + bool(one.technique.lag) / 4


def _quickest(
    asked: Pipelined, terms: Terms, budget: Bytes, devices: int, trials: int
) -> Iterator[Pipelined]:
    """The candidates with their cuts, those that the closed formula has as the quickest."""
    micros = asked.micro_batches or terms.request.micro_batches
    open_ = replace(asked, micro_batches=micros, schedule=asked.known_schedule, lag=asked.lag or 0)
    most = devices // asked.width
    if asked.schedule == "2bw":
        shortest = terms.shortest or terms.request.micro_batches
        most = min(most, shortest * terms.split(micros).pieces // asked.width)
    counts = [asked.stages] if asked.stages else range(2, most + 1)
    fitting: list[tuple[float, Pipelined]] = []
    large: list[Pipelined] = []
    for stages in counts:
        times = _rounds(stages * asked.width, devices, trials)
        for recompute in (False, True) if asked.recompute is None else (asked.recompute,):
            one = _with_cuts(replace(open_, stages=stages, recompute=recompute), terms, budget)
            if one is not None and one[1]:
                about_s = times * closed_form_s(one[0], terms.measure)
                fitting.append((about_s, one[0]))
                if asked.lag is None and _waits_for_messages(one[0], terms):
                    ahead = _with_cuts(
                        replace(open_, stages=stages, recompute=recompute, lag=stages - 1),
                        terms,
                        budget,
                    )
                    fitting += [(about_s, ahead[0])] if ahead is not None and ahead[1] else []
                break  # forwards are not run again for nothing
            if one is not None:
                large.append(one[0])
    fitting.sort(key=lambda one: one[0])
    least = fitting[0][0] if fitting else 0.0
    yield from (one for seconds, one in fitting[:MOST_REPLAYED] if seconds <= NEAR * least)
    yield from large[-MOST_LARGE:]


def _with_cuts(asked: Pipelined, terms: Terms, budget: Bytes) -> tuple[Pipelined, bool] | None:
    """The technique with the cuts that fit on paper, or those that need the least; and which."""

    def fits(technique: Pipelined) -> bool:
        return max(need.total for need in _needs_on_paper(technique, terms)) <= budget

    if asked.cuts is not None:
        return asked, fits(asked)
    measure, micros = terms.measure, asked.micro_batches or 1
    split, batch = terms.split(micros), terms.batch(micros)
    cutter = Cutter(measure.layers, batch, split, measure.buffer_bytes)
    if (asked.stages or 1) > cutter.most:
        return None
    pipeline = pipeline_of(asked, (), terms, _bounding(asked))
    for margin in MARGINS:  # a cutter's bytes are a little less than a program's
        cuts = cutter.quickest(pipeline, Bytes(int(margin * budget)), predict=asked.predict)
        if cuts is not None and fits(technique := replace(asked, cuts=cuts)):
            return technique, True
    cuts = cutter.smallest(pipeline, predict=asked.predict)
    return None if cuts is None else (replace(asked, cuts=cuts), False)


def _waits_for_messages(technique: Pipelined, terms: Terms) -> bool:
    """Whether there and back between two stages is long beside what the slowest computes."""
    if technique.known_schedule not in ("flush", "2bw"):
        return False
    stages = _stages(technique, guessed(technique.cuts or (), terms.measure), terms, None)
    batch = terms.batch(technique.micro_batches or 1)
    most = max(shard.boundary_bytes + batch + shard.carry_bytes for shard in stages)
    away_s = 2 * MESSAGE_S + most * byte_s(terms.speeds)
    return away_s > AWAY * max(shard.forward_s + shard.backward_s for shard in stages)


def closed_form_s(technique: Pipelined, measure: JobMeasure) -> float:
    """About how long a step takes: the bubbles of the papers, with uneven stages."""
    shards = predicted(measure.layers, technique.cuts or ())
    micros = ceil((technique.micro_batches or 1) / technique.width)
    again = bool(technique.recompute)
    each = [s.backward_s + again * s.forward_s for s in shards[:-1]] + [shards[-1].backward_s]
    once, slowest = sum(each), max(each)
    if technique.schedule == "naive":
        return micros * once
    filling = 0.0 if technique.schedule == "2bw" else once - slowest
    if technique.schedule == "zb-h1":
        filling /= 3
    return micros * slowest + filling


def _on_paper(technique: Pipelined, terms: Terms) -> Staged:
    return staged(technique, guessed(technique.cuts or (), terms.measure), terms, None)


def _needs_on_paper(technique: Pipelined, terms: Terms) -> tuple[Need, ...]:
    stages = _stages(technique, guessed(technique.cuts or (), terms.measure), terms, None)
    return _needs(technique, stages, (), terms.batch(technique.micro_batches or 1), terms)


def guessed(cuts: Sequence[int], measure: JobMeasure) -> tuple[ShardSpec, ...]:
    """Stages, or shards, from what layers measured; each has its part of the step's bytes."""
    shards = predicted(measure.layers, cuts)
    if not measure.shards:
        return shards
    whole = measure.shards[0]
    each = whole.step_peak_bytes / max(1, whole.owned_bytes)
    return tuple(
        replace(shard, step_peak_bytes=Bytes(ceil(each * shard.owned_bytes))) for shard in shards
    )


def staged(
    technique: Pipelined,
    shards: Sequence[ShardSpec],
    terms: Terms,
    layout: TrialLayout | None,
) -> Staged:
    """What a resolved technique needs and takes with these shards, guessed or measured."""
    batch, ties = terms.batch(technique.micro_batches or 1), ties_of(layout)
    stages = _stages(technique, shards, terms, layout)
    steps = Steps(technique=technique, stages=stages, ties=ties, batch=batch, terms=terms)
    found = steps.replayed()
    return Staged(
        technique=technique,
        stages=stages,
        needs=_needs(technique, stages, ties, batch, terms),
        step_s=found.step_s,
        bubbles=found.bubbles,
        stops=found.stops,
        stops_s=found.stops_s,
    )


def _stages(
    technique: Pipelined,
    shards: Sequence[ShardSpec],
    terms: Terms,
    layout: TrialLayout | None,
) -> tuple[ShardSpec, ...]:
    micros = technique.micro_batches or 1
    travelling, tied = as_they_travel(shards, technique), tied_bytes(layout, len(shards))
    stages = as_stages(travelling, terms.split(micros), tied)
    if not terms.measure.draws:
        return stages
    return drawing_ahead(stages, terms.batch(micros), terms.measure.layers)


# -- ties -----------------------------------------------------------------------------------


def ties_of(layout: TrialLayout | None) -> tuple[tuple[int, int], ...]:
    """Pairs of stages: who owns a parameter, and who borrows it."""
    shards = layout.shards if layout is not None else ()
    return tuple(
        sorted({(owner, index) for index, s in enumerate(shards) for owner, _ in s.borrowed})
    )


def tied_bytes(layout: TrialLayout | None, stages: int) -> list[int]:
    """Bytes of tied weights' gradients that each stage hands back on their way to the owner."""
    carried = [0] * stages
    crossing: set[tuple[int, str]] = set()
    for index, shard in enumerate(layout.shards if layout is not None else ()):
        for owner, field in shard.borrowed:
            for stage in range(owner + 1, index + 1):
                if (stage, field.spec.name) not in crossing:
                    crossing.add((stage, field.spec.name))
                    carried[stage] += field.spec.num_bytes
    return carried


# -- bytes ----------------------------------------------------------------------------------


def _bounding(technique: Pipelined) -> tuple[int, ...]:
    """Steps that are as full as all of a training: with no more micro-batches than that takes."""
    micros, stages = technique.micro_batches or 1, technique.stages or 1
    if technique.schedule != "gpipe":
        micros = min(micros, technique.width * (2 * stages + 2))
    return (micros,) * (3 if technique.schedule == "2bw" else 2)


def _needs(
    technique: Pipelined,
    stages: Sequence[ShardSpec],
    ties: tuple[tuple[int, int], ...],
    batch: Bytes,
    terms: Terms,
) -> tuple[Need, ...]:
    pipeline = pipeline_of(technique, stages, terms, _bounding(technique), ties)
    travels = Bytes(batch + RNG_BYTES * terms.measure.draws)
    costs = {0: JobCosts(shards=tuple(stages), batch_bytes=travels)}
    prints = check_pipeline(pipeline, pipeline.program(), costs)
    return tuple(
        _need(pipeline, technique, stages, stage, found, batch, terms)
        for stage, found in enumerate(prints[: len(stages)])  # those of other copies need no more
    )


def _need(
    pipeline: Pipeline,
    technique: Pipelined,
    stages: Sequence[ShardSpec],
    stage: int,
    found: Footprint,
    batch: Bytes,
    terms: Terms,
) -> Need:
    """A stage's bytes: its program's, messages on their way, and an evaluation's."""
    here, guess = stages[stage], stages[stage].owned_bytes if technique.predict else 0
    fixed = terms.measure.buffer_bytes + guess
    waiting = frames(pipeline, stages, stage, batch)
    held, peak = found.held_bytes + waiting, found.peak_bytes + waiting
    pieces = terms.split(technique.micro_batches or 1).pieces  # validation batches stay whole
    seen, inside = evaluating(stages, stage, batch, pieces * terms.measure.valid_scale)
    held = max(held, found.kept_bytes + seen)
    peak = max(peak, found.kept_bytes + seen + inside, held)
    varies = max(found.unit_bytes, inside)  # the largest unit may come when little is held
    unit = varies if terms.request.varies else peak - held
    return Need(
        held=Bytes(fixed + held),
        unit=Bytes(unit),
        peak=Bytes(fixed + peak),
        moved=Bytes(here.boundary_bytes + here.carry_bytes),
    )


def frames(pipeline: Pipeline, stages: Sequence[ShardSpec], stage: int, batch: Bytes) -> int:
    """Messages that came before they are asked for, and one on its way out, of each line.

    With copies of the pipeline the first one reads the next micro-batches of all ahead. What is on
    its way out is the host's memory: it is room for what is counted less closely than halves are,
    such as an optimizer's first step.
    """
    halves = pipeline.schedule == "zb-h1"
    size = ROUNDS_AHEAD * pipeline.width * batch if pipeline.width > 1 and not stage else 0
    if stage:
        ahead = pipeline.bound(stage - 1) - pipeline.bound(stage)
        came = max(1, min(FRAMES_AHEAD, ahead))
        size += came * (stages[stage].boundary_bytes + batch)
        size += 0 if halves else stages[stage].carry_bytes
    if stage + 1 < len(stages):
        size += stages[stage + 1].carry_bytes
        size += 0 if halves else stages[stage + 1].boundary_bytes + batch
    return size


def evaluating(
    stages: Sequence[ShardSpec], stage: int, batch: Bytes, scale: float
) -> tuple[int, int]:
    """What a stage holds for a validation batch, with one more on its way, and inside it."""
    passing = stages[stage].boundary_bytes
    if stage + 1 < len(stages):
        passing = Bytes(max(passing, stages[stage + 1].boundary_bytes))
    held = scale * (2 * (stages[stage].boundary_bytes + batch) + passing)
    return ceil(held), ceil(scale * stages[stage].forward_peak_bytes)


def together(staged: Staged, terms: Terms, layout: TrialLayout | None, trials: int) -> StepTime:
    """What a step of one of so many trials takes of the devices.

    One computes in the bubbles of the others.
    """
    technique = staged.technique
    return Steps(
        technique=technique,
        stages=staged.stages,
        ties=ties_of(layout),
        batch=terms.batch(technique.micro_batches or 1),
        terms=terms,
        together=trials,
    ).replayed()


# -- against one device ---------------------------------------------------------------------


WORTH = 0.9
"""A pipeline that nobody asked for takes at most so much of what one device takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What a step takes on one device, resident or spilled, and in which of the two ways."""

    name: str
    step_s: Seconds


def is_worth(staged: Staged, other: Alternative, devices: int, trials: int) -> bool:
    """Whether all trials are through with a step clearly sooner as pipelines than one a device."""
    alone_s = ceil(trials / devices) * other.step_s
    return study_s(staged, devices, trials) < WORTH * alone_s


def resident_s(measure: JobMeasure, request: Request, speeds: Speeds) -> Seconds:
    """A step of the whole model on one device, if it were large enough."""
    whole = measure.layers
    units = sum(layer.backward_s for layer in whole) * request.micro_batches
    return Seconds(units + sum(layer.step_s for layer in whole) * speeds.device_step)
