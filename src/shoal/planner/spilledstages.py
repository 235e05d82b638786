"""A pipeline of spilled stages on paper: its shards, what stays, its bytes, how long a step takes.

[Note: the choice of spilled stages]
Stages are cut so that the slowest is as quick as can be, whatever they hold, and each is cut into
shards: one more for the stage whose largest shard is the largest of all, until every stage fits
its device. Then the room that is left keeps shards: as many of each stage as fit. Fewest shards,
and more of them (smaller slots leave more room), and both places of the step are replayed with
the measured seconds, the links and the messages. As with every pipeline it counts when all trials
have done a step, and of candidates that are about as quick the one with the fewest devices.

Layers say what should fit; the shards themselves are measured afterwards, and ``fitted`` says what
of them stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from shoal.core.spec import Place, ShardSpec
from shoal.core.technique import Pipelined, kept_shards, spans_of
from shoal.core.units import Bytes, Seconds
from shoal.memory.layout import TrialLayout, stage_arena
from shoal.partition.cut import cut, shard_cost
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.spilled import SpilledPipeline
from shoal.pipeline.spilledcheck import check_evaluation, check_spilled
from shoal.planner.need import Need
from shoal.planner.pipeline import (
    Staged,
    evaluating,
    frames,
    guessed,
    ranked,
    tied_bytes,
    ties_of,
)
from shoal.planner.stages import Cutter, as_stages, most_pieces
from shoal.planner.steptime import MESSAGE_S, MOST_MICROS, Terms, byte_s, lengthened
from shoal.program.costs import JobCosts
from shoal.program.footprint import footprint
from shoal.program.ir import Action, Op, Part
from shoal.program.replay import Run, replay
from shoal.spill.generate import kept_of

TIMES = (2, 3)
"""Of the fewest shards that fit so many times as many are tried too."""
ANYTHING = Bytes(2**62)


def spilled_candidates(
    asked: Pipelined, terms: Terms, budget: Bytes, devices: int, trials: int
) -> list[Staged]:
    """Pipelines of spilled stages on paper that should fit, the best first."""
    found: dict[Pipelined, Staged] = {}
    for open_ in _settings(asked, terms, devices):
        for one in _some(open_, asked, terms, budget):
            found.setdefault(one.technique, one)
    return ranked(list(found.values()), devices, trials)


def smallest(asked: Pipelined, terms: Terms, devices: int) -> Staged | None:
    """Cut as finely as it can be with nothing kept: what is told where nothing fits."""
    least: list[Staged] = []
    for open_ in _settings(replace(asked, lookahead=asked.lookahead or 0), terms, devices):
        bare = replace(open_, recompute=True, keep=asked.keep or ())
        most = asked.shards or most_pieces(terms.measure.layers)
        technique = _edged(replace(bare, keep_gradients=bool(asked.keep_gradients)), terms, most)
        if technique is not None:
            paper = _Paper(*technique, terms, None)
            least.append(paper.staged(timed=False))
    return min(least, key=lambda one: one.need.total, default=None)


def fitted(
    asked: Pipelined,
    one: Staged,
    shards: Sequence[ShardSpec],
    terms: Terms,
    layout: TrialLayout | None,
    budget: Bytes,
) -> Staged | None:
    """A candidate with its measured shards, and of them as many kept as fit; None: it does not."""
    paper = _Paper(_bare(one.technique, asked), shards, terms, layout)
    filled = [one.staged() for one in _filled(paper, asked, budget)]
    return min(filled, key=lambda one: one.step_s, default=None)


def as_measured(
    asked: Pipelined,
    one: Staged,
    shards: Sequence[ShardSpec],
    terms: Terms,
    layout: TrialLayout | None,
) -> Staged:
    """What a candidate needs with its measured shards and nothing kept that was not asked for."""
    return _Paper(_bare(one.technique, asked), shards, terms, layout).staged(timed=False)


def _settings(asked: Pipelined, terms: Terms, devices: int) -> Iterator[Pipelined]:
    """What is left open, one after the other: stages, and where the step is."""
    micros = asked.micro_batches or terms.request.micro_batches
    place = asked.optimizer or terms.request.place
    places: tuple[Place, ...] = (place,) if place else ("host", "device")
    most = min(devices, most_pieces(terms.measure.layers), asked.shards or devices)
    counts = [asked.stages] if asked.stages else range(2, most + 1)
    for stages, where in itertools.product(counts, places):
        named = replace(asked, schedule=asked.known_schedule, lag=asked.lag or 0)
        yield replace(named, stages=stages, micro_batches=micros, optimizer=where)


def _some(open_: Pipelined, asked: Pipelined, terms: Terms, budget: Bytes) -> Iterator[Staged]:
    """With one unit ahead, or none where there is no room for that: a few numbers of shards."""
    for lookahead in (1, 0) if asked.lookahead is None else (asked.lookahead,):
        ahead = replace(open_, lookahead=lookahead)
        fewest = next(_fitting(ahead, asked, terms, budget), None)
        if fewest is None:
            continue
        least, finest = len(fewest.shards), most_pieces(terms.measure.layers)
        more = [] if asked.shards else sorted({min(finest, times * least) for times in TIMES})
        counts = [count for count in more if count > least]
        papers = [_of_count(ahead, asked, terms, count) for count in counts]
        for paper in (fewest, *papers):
            if paper is not None:
                yield from (one.staged(proves=False) for one in _filled(paper, asked, budget))
        return


def _fitting(open_: Pipelined, asked: Pipelined, terms: Terms, budget: Bytes) -> Iterator[_Paper]:
    """Those that fit with nothing kept that was not asked for, from the fewest shards on."""
    least = asked.shards or max(open_.stages or 2, 2)
    for count in [least] if asked.shards else range(least, most_pieces(terms.measure.layers) + 1):
        paper = _of_count(open_, asked, terms, count)
        if paper is not None and paper.least <= budget and paper.fits(budget):
            yield paper


def _of_count(open_: Pipelined, asked: Pipelined, terms: Terms, count: int) -> _Paper | None:
    found = _edged(replace(_bare(open_, asked), shards=count), terms, count)
    return None if found is None else _Paper(*found, terms, None)


def _bare(technique: Pipelined, asked: Pipelined) -> Pipelined:
    """With nothing kept that was not asked for."""
    recompute = True if asked.recompute is None else asked.recompute
    gradients = bool(asked.keep_gradients)
    return replace(technique, keep=asked.keep or (), recompute=recompute, keep_gradients=gradients)


def _edged(
    technique: Pipelined, terms: Terms, count: int
) -> tuple[Pipelined, tuple[ShardSpec, ...]] | None:
    """The technique with its stages' cuts, and its shards; None where so many cannot be made."""
    measure, stages = terms.measure, technique.stages or 2
    cuts = technique.cuts
    if cuts is None:
        micros = technique.micro_batches or 1
        split, batch = terms.split(micros), terms.batch(micros)
        cutter = Cutter(measure.layers, batch, split)
        if stages > cutter.most:
            return None
        pipeline = Pipeline(schedule="naive", stages=stages, groups=(1,))
        cuts = cutter.quickest(pipeline, ANYTHING)
    edges = None if cuts is None else _edges(terms, cuts, count, technique.optimizer == "device")
    if edges is None:
        return None
    resolved = replace(technique, cuts=cuts, shards=count)
    return resolved, guessed(edges, measure)


def _edges(
    terms: Terms, cuts: tuple[int, ...], count: int, with_state: bool
) -> tuple[int, ...] | None:
    """Where shards begin, but for the first: each stage in as many as make the largest small."""
    layers = terms.measure.layers
    cost = shard_cost(layers, with_state=with_state)
    bounds = list(itertools.pairwise((0, *cuts, len(layers))))

    def shards_of(stage: int, number: int) -> list[int] | None:
        start, stop = bounds[stage]
        if number > most_pieces(layers[start:stop]):
            return None
        inner = cut(layers[start:stop], number, lambda a, b: cost(start + a, start + b))
        return [start, *(start + place for place in inner), stop]

    found = [[start, stop] for start, stop in bounds]
    while sum(len(edges) - 1 for edges in found) < count:
        sizes = [max(cost(a, b) for a, b in itertools.pairwise(edges)) for edges in found]
        for stage in sorted(range(len(found)), key=lambda stage: -sizes[stage]):
            if (finer := shards_of(stage, len(found[stage]))) is not None:
                found[stage] = finer
                break
        else:
            return None
    if sum(len(edges) - 1 for edges in found) != count:
        return None
    return tuple(edge for edges in found for edge in edges[:-1])[1:]


def _filled(paper: _Paper, asked: Pipelined, budget: Bytes) -> list[_Paper]:
    """With what room there is used: for gradients or not, for shards, for what forwards saved."""
    if not paper.fits(budget):
        return []
    bases = [paper]
    if asked.keep_gradients is None and paper.micros > 1:
        bases.insert(0, paper.if_it_fits(budget, keep_gradients=True))
    found: dict[Pipelined, _Paper] = {}
    for best in bases:
        if asked.keep is None:
            best = best.keeping(budget)
        if asked.recompute is None and best.technique.keep:
            best = best.if_it_fits(budget, recompute=False)
        found.setdefault(best.technique, best)
    return list(found.values())


@dataclass(frozen=True)
class _Paper:
    """A resolved technique with its shards, guessed or measured."""

    technique: Pipelined
    measured: Sequence[ShardSpec]
    terms: Terms
    layout: TrialLayout | None

    # -- what it is -----------------------------------------------------------------------

    @property
    def micros(self) -> int:
        """Micro-batches of a step."""
        return self.technique.micro_batches or 1

    @cached_property
    def batch(self) -> Bytes:
        """Bytes of a micro-batch."""
        return self.terms.batch(self.micros)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Per stage its shards."""
        return spans_of(self.technique, self.measured)

    @cached_property
    def shards(self) -> tuple[ShardSpec, ...]:
        """For one micro-batch; what enters a stage is all that later ones read."""
        split, tied = self.terms.split(self.micros), tied_bytes(self.layout, len(self.measured))
        whole = tuple(replace(shard, narrow=None) for shard in self.measured)
        firsts = {first for first, _ in self.spans}
        return tuple(
            here if shard.index in firsts else replace(here, boundary_bytes=split.of(new))
            for shard, here in zip(whole, as_stages(whole, split, tied), strict=True)
            for new in [shard.boundary_bytes]
        )

    def spilled(self, micros: int, *, foretold: bool = True) -> SpilledPipeline:
        """The pipeline of a step of so many micro-batches."""
        technique, draws = self.technique, self.terms.measure.draws
        assert technique.optimizer is not None
        pipeline = Pipeline(
            schedule=technique.known_schedule,
            stages=technique.stages or 1,
            groups=(micros,),
            recompute=bool(technique.recompute),
            lag=technique.lag or 0,
            clip=self.terms.request.clip,
            draws=draws,
            foretold=draws and foretold,
            follows=True,
        )
        return SpilledPipeline(
            pipeline=pipeline,
            spans=self.spans,
            optimizer=technique.optimizer,
            lookahead=technique.lookahead or 0,
            keep=technique.keep or (),
            keep_gradients=bool(technique.keep_gradients),
            ties=ties_of(self.layout),
        )

    def changed(self, **how: object) -> _Paper:
        """The same with other settings."""
        return _Paper(replace(self.technique, **how), self.measured, self.terms, self.layout)  # type: ignore[arg-type]  # settings by name

    # -- bytes ----------------------------------------------------------------------------

    @property
    def least(self) -> int:
        """Surely needed: the slots, and the largest unit."""
        state = self.technique.optimizer == "device" and not self.terms.request.clip
        slot = max(s.parameter_bytes + state * s.state_bytes for s in self.shards)
        inside = max(s.backward_peak_bytes for s in self.shards)
        if self.technique.keep:
            return inside
        return inside + slot

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """What each stage needs; of a model that draws, whether that is foretold or not."""
        return tuple(map(self._need, range(len(self.spans))))

    def fits(self, budget: Bytes) -> bool:
        """Whether every stage fits; the first holds the most and is asked first."""
        return all(self._need(stage).most <= budget for stage in range(len(self.spans)))

    def _bounding(self) -> int:
        """A step as full as any: with no more micro-batches than that takes."""
        if self.technique.schedule == "gpipe":
            return self.micros
        return min(self.micros, 2 * len(self.spans) + 2)

    @cached_property
    def _known(self) -> dict[int, Need]:
        return {}

    def _need(self, stage: int) -> Need:
        if stage not in self._known:
            self._known[stage] = self._need_anew(stage)
        return self._known[stage]

    def _need_anew(self, stage: int) -> Need:
        options = [self._need_of(stage, True)]
        if self.terms.measure.draws and self.technique.schedule == "gpipe":
            options.append(self._need_of(stage, False))
        held = max(need.held for need in options)
        peak = max(need.peak for need in options)
        unit = max(need.most for need in options) - held
        return Need(held=held, unit=Bytes(unit), peak=peak, moved=options[0].moved)

    def _need_of(self, stage: int, foretold: bool) -> Need:
        """A stage's bytes: its program's, messages on their way, and an evaluation's."""
        spilled = self.spilled(self._bounding(), foretold=foretold)
        costs = {0: JobCosts(shards=self.shards, batch_bytes=self.batch)}
        found = footprint(spilled.actions(stage), costs, start=spilled.kept()[stage])
        region = found.arena_bytes
        if self.layout is not None:
            here, clip = range(*self.spans[stage]), self.terms.request.clip
            region = Bytes(stage_arena(self.layout, self.technique, here, clip=clip).num_bytes)
        waiting = frames(spilled.pipeline, self._entries, stage, self.batch)
        if spilled.shard_by_shard and stage + 1 < len(self.spans):  # all of them may have come
            waiting += (self.micros - 1) * self._entries[stage + 1].carry_bytes
        held = region + found.held_bytes - found.arena_bytes + waiting
        peak = region + found.peak_bytes - found.arena_bytes + waiting
        pieces = self.terms.split(self.micros).pieces  # validation batches stay whole
        scale = pieces * self.terms.measure.valid_scale
        seen, _ = evaluating(self._entries, stage, self.batch, scale)
        first, stop = self.spans[stage]
        largest = max(s.forward_peak_bytes for s in self.shards[first:stop])
        inner = max((s.boundary_bytes for s in self.shards[first + 1 : stop]), default=0)
        inside = ceil(scale * (largest + inner))
        held = max(held, region + seen)
        peak = max(peak, region + seen + inside, held)
        if not stage:  # a batch of a new form may come when the most is held
            peak = max(peak, (held if self.terms.measure.draws else region) + self._look)
            inside = max(inside, self._look)
        unit = max(found.unit_bytes, inside) if self.terms.request.varies else peak - held
        fixed = self.terms.measure.buffer_bytes
        return Need(
            held=Bytes(fixed + held),
            unit=Bytes(unit),
            peak=Bytes(fixed + peak),
            moved=Bytes(found.up_bytes + found.down_bytes),
        )

    @cached_property
    def _look(self) -> int:
        """What the first stage takes to see what a batch draws, beside what it holds.

        It runs the whole model once, and has the weights of one layer there at a time.
        """
        measure, split = self.terms.measure, self.terms.split(self.micros)
        entered = as_stages(self.measured, split, tied_bytes(self.layout, len(self.measured)))
        inside = max(shard.forward_peak_bytes + shard.boundary_bytes for shard in entered)
        layers = (layer.parameter_bytes + layer.borrowed_bytes for layer in measure.layers)
        batches = (1 + split.pieces) * self.batch  # as it was read, and a copy of a piece
        return inside + max(layers, default=0) + batches + measure.buffer_bytes

    @cached_property
    def _entries(self) -> tuple[ShardSpec, ...]:
        """The first shard of each stage, as what enters and leaves the stage goes by it."""
        return tuple(self.shards[first] for first, _ in self.spans)

    # -- what stays -----------------------------------------------------------------------

    def if_it_fits(self, budget: Bytes, **how: object) -> _Paper:
        """Changed so, or as it is."""
        other = self.changed(**how)
        return other if other.fits(budget) else self

    def keeping(self, budget: Bytes) -> _Paper:
        """With as many shards of each stage kept as fit."""
        mixes = self.technique.optimizer == "device" or self.terms.request.mixes
        best = self
        for stage in range(len(self.spans)) if mixes else ():
            best = best._keeping_at(stage, budget)
        return best

    def _keeping_at(self, stage: int, budget: Bytes) -> _Paper:
        first, stop = self.spans[stage]
        borrow = [s.index - first for s in self.measured[first:stop] if _borrows(s)]
        others = tuple(s for s in self.technique.keep or () if s not in range(first, stop))
        best, few, many = self, 0, stop - first - len(borrow)
        while few < many:
            count = (few + many + 1) // 2
            stays = (first + shard for shard in kept_of(stop - first, count, borrow))
            tried = self.changed(keep=tuple(sorted((*others, *stays))))
            if tried._need(stage).most <= budget:
                best, few = tried, count
            else:
                many = count - 1
        return best

    # -- all of it ------------------------------------------------------------------------

    def staged(self, *, timed: bool = True, proves: bool = True) -> Staged:
        """It, with the seconds of a step; what is one of many on paper is not proved."""
        if proves:
            self._prove()
        step_s, bubbles = self._replayed() if timed else (Seconds(1e-6), 0.0)
        return Staged(
            technique=self.technique,
            stages=self.shards,
            needs=self.needs,
            step_s=step_s,
            bubbles=bubbles,
        )

    def _prove(self) -> None:
        spilled = self.spilled(self._bounding())
        costs = {0: JobCosts(shards=self.shards, batch_bytes=self.batch)}
        check_spilled(spilled, spilled.program(), costs)
        check_evaluation(spilled, costs)

    def _replayed(self) -> tuple[Seconds, float]:
        """Seconds of a step in the middle of a training, and the part of them that is bubbles."""
        some = min(self.micros, max(MOST_MICROS, 2 * len(self.spans)))
        step_s, busy_s = lengthened(self._steady, some, self.micros)
        bubbles = 1.0 - busy_s / (len(self.spans) * step_s) if step_s > 0 else 0.0
        return Seconds(max(step_s, 1e-6)), min(max(bubbles, 0.0), 1.0)

    def _steady(self, micros: int) -> tuple[float, float]:
        speeds, spilled = self.terms.speeds, self.spilled(micros)
        costs = JobCosts(
            shards=tuple(map(self._stepped, self.shards)),
            batch_bytes=self.batch,
            up_bytes_per_s=speeds.up_bytes_per_s,
            down_bytes_per_s=speeds.down_bytes_per_s,
        )
        here = {shard: parts for kept in spilled.kept() for shard, parts in kept.items()}
        run = Run(
            program=spilled.program(),
            costs={0: costs},
            devices=tuple(range(len(self.spans))),
            start=here,
        )

        def ran(steps: int) -> tuple[float, float]:
            timeline = replay(
                [replace(run, steps=steps)], durations=self._message_s, keep_spans=False
            )
            computes = [s for (_, stream), s in timeline.busy_s.items() if stream == "compute"]
            return timeline.makespan_s, sum(computes)

        (first_s, first_busy_s), (all_s, all_busy_s) = ran(1), ran(3)
        return (all_s - first_s) / 2, (all_busy_s - first_busy_s) / 2

    def _stepped(self, shard: ShardSpec) -> ShardSpec:
        on_device = self.technique.optimizer == "device" or shard.index in kept_shards(
            self.technique
        )
        speeds = self.terms.speeds
        times = speeds.device_step if on_device else speeds.host_step
        return replace(shard, step_s=Seconds(shard.step_s * times))

    def _message_s(self, action: Action) -> Seconds | None:
        """How long a message takes from device to device; None of what is none."""
        if action.op is not Op.SEND:
            return None
        shard, size = self.shards[action.shard], 0
        if Part.GRAD in action.parts:
            size = shard.carry_bytes
        elif not action.parts:
            size = shard.boundary_bytes + self.batch
        return Seconds(MESSAGE_S + size * byte_s(self.terms.speeds))


def _borrows(shard: ShardSpec) -> bool:
    return shard.parameter_bytes > shard.owned_bytes
