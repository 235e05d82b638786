"""Pipelines whose stages are spilled: each is made of shards, of which some are there at a time.

[Note: spilled stages]
A stage's units are those of its shards. Their LOADs, STOREs and DROPs come from the generator of
spilled steps (``spill.generate``), and are in one list with the messages. What crosses devices is
what crosses two stages: the boundary into the first shard of a stage, and the gradients that its
backward hands back. Stages of two shards each, "flush", the first of two micro-batches:

    device 0   LOAD s0   LOAD s1   F s0 m0   F s1 m0   SEND s2 m0 d1   ...
    device 1   LOAD s2   LOAD s3   RECV s2 m0 d0   F s2 m0   B s3 m0   B s2 m0   SEND s2 m0 grad d0

A RECV stands right before the unit that needs it, so that loads go on while a stage waits.

    naive, flush   a stage's forward or backward of a micro-batch goes through its shards; one that
                   comes again next stays in its slot: from B s0 m0 to F s0 m2 nothing is loaded
    gpipe          a shard takes all micro-batches in one visit: a load is paid once for all
                   forwards and once for all backwards, and the boundaries of all are held. Not
                   where the model draws numbers that nobody can foretell: there each
                   micro-batch waits for the end of the one before

[Note: what else crosses spilled stages]
    norm    one message for each shard, to stage 0; the factor back
    param   that the host's copy of a lender is the new version: every LOAD of a borrower reads it
            there, and no value travels. Sent when the lender's STORE, or its step on the host, is
            over; received before the step ends
    rng     as in any pipeline
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shoal.core.errors import SpecError
from shoal.core.spec import Place
from shoal.core.technique import SPILLING
from shoal.pipeline.schedule import Pipeline
from shoal.program.ir import Action, Kept, Op, Part, Program, kept, single
from shoal.spill.generate import Route, Shape, Unit, in_order

GRAD, NORM, PARAM, RNG = (Part.GRAD,), (Part.NORM,), (Part.PARAM,), (Part.RNG,)
Visit = tuple[Op, int, tuple[int, ...]]
"""What a stage does with a shard while it is there: F or B, the shard, of which micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpilledPipeline:
    """Which program trains one model over several devices for one step, its stages spilled.

    ``pipeline`` says in which order stages compute, and what else there is to a step; it has no
    ties of its own. ``spans`` are each stage's shards. Those in ``keep`` stay on their device and
    step there; ``optimizer`` is where the others step. ``lookahead`` L gives L + 1 slots to a
    stage. With ``keep_gradients`` gradients wait on the device for other micro-batches, and with
    clipping for the norm if the step is there. ``ties`` are pairs of shards, the owner of a
    parameter and one that borrows it. With the pipeline's ``recompute`` no shard keeps what its
    forward saved, else those in ``keep`` do.

    Raises:
        SpecError: no such pipeline; says what is wrong, with the numbers.
    """

    pipeline: Pipeline
    spans: tuple[tuple[int, int], ...]
    optimizer: Place = "host"
    lookahead: int = 1
    keep: tuple[int, ...] = ()
    keep_gradients: bool = False
    ties: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        schedule, edges = self.pipeline.schedule, [first for first, _ in self.spans]
        if schedule not in SPILLING:
            named = ", ".join(map(repr, SPILLING))
            raise SpecError(f"stages are spilled with schedules {named}, not with {schedule!r}.")
        if len(self.pipeline.groups) != 1:
            raise SpecError(
                f"a program of spilled stages is of one step, got {len(self.pipeline.groups)}."
            )
        whole = [0, *(stop for _, stop in self.spans)][:-1] == edges
        if len(self.spans) != self.pipeline.stages or not whole or not _ascending(self.spans):
            raise SpecError(
                f"{self.pipeline.stages} stages have as many spans of shards, one after another; "
                f"got {self.spans}."
            )
        stale = [borrower for _, borrower in self.ties if borrower in self.keep]
        if stale:
            raise SpecError(
                f"shard {stale[0]} borrows parameters, of which a copy that stays would be old "
                "after the owner's step. Leave it out of keep=."
            )

    @property
    def num_shards(self) -> int:
        """Of all stages."""
        return self.spans[-1][1]

    @property
    def shard_by_shard(self) -> bool:
        """Whether a shard takes all micro-batches in one visit."""
        unforeseen = self.pipeline.draws and not self.pipeline.foretold
        return self.pipeline.schedule == "gpipe" and not unforeseen

    @property
    def sums_here(self) -> bool:
        """Whether gradients wait on the device for other micro-batches."""
        one_by_one = self.pipeline.schedule == "gpipe" and not self.shard_by_shard
        return self.keep_gradients or one_by_one

    @property
    def saves(self) -> tuple[int, ...]:
        """Shards that keep what their forward saved."""
        if self.pipeline.recompute:
            return ()
        return tuple(shard for shard in self.keep if shard + 1 < self.num_shards)

    def stage_of(self, shard: int) -> int:
        """The stage that has a shard."""
        return next(stage for stage, (_, stop) in enumerate(self.spans) if shard < stop)

    def stays(self, stage: int) -> tuple[int, ...]:
        """The shards of a stage that stay on its device."""
        return tuple(shard for shard in self.keep if shard in range(*self.spans[stage]))

    def kept(self) -> tuple[Kept, ...]:
        """What is on each device before and after the program."""
        return tuple(kept(self.stays(stage)) for stage in range(len(self.spans)))

    def bound(self, stage: int) -> int:
        """The most micro-batches of which a stage may hold activations at a time."""
        is_alone = stage == len(self.spans) - 1 and len(range(*self.spans[stage])) == 1
        if self.shard_by_shard and not is_alone:
            return self.pipeline.num_micros
        return self.pipeline.bound(stage)

    def actions(self, stage: int) -> tuple[Action, ...]:
        """One stage's list of a step."""
        return tuple(_Stage(self, stage).actions())

    def program(self) -> Program:
        """A step; see ``spilledcheck`` for its proof."""
        return _program(self)

    def evaluation(self) -> Program:
        """One validation batch through all stages: forwards alone, the last one with the loss."""
        return _evaluation(self)

    def visits(self, stage: int) -> Iterator[Visit]:
        """What a stage does with its shards, in order."""
        if self.shard_by_shard:
            yield from self._shard_by_shard(stage)
            return
        for op, micro in self.pipeline.order(stage):
            yield from self._through(stage, op, (micro,))

    def _shard_by_shard(self, stage: int) -> Iterator[Visit]:
        all_ = tuple(range(self.pipeline.num_micros))
        if stage + 1 < len(self.spans):
            yield from self._through(stage, Op.F, all_)
        yield from self._through(stage, Op.B, all_)

    def _through(self, stage: int, op: Op, micros: tuple[int, ...]) -> Iterator[Visit]:
        """Through a stage's shards; the last stage's backward begins with its forward."""
        here, is_last = range(*self.spans[stage]), stage + 1 == len(self.spans)
        if op is Op.F or is_last:
            yield from ((Op.F, shard, micros) for shard in (here[:-1] if is_last else here))
        if op is Op.B:
            yield from ((Op.B, shard, micros) for shard in reversed(here))

    def route(self, stage: int) -> Route:
        """How a stage's shards travel."""
        waits: tuple[int, ...] = ()
        if self.sums_here and self.optimizer == "device":
            waits = tuple(s for s in range(*self.spans[stage]) if s not in self.keep)
        return Route(
            self.num_shards,
            optimizer=self.optimizer,
            lookahead=self.lookahead,
            lookbehind=1 if self.lookahead else 0,
            keep=self.stays(stage),
            lent=tuple(sorted({owner for owner, _ in self.ties})),
            order="shard" if self.shard_by_shard else "micro",
            saves=self.saves,
            waits=waits,
        )


def _ascending(spans: Sequence[tuple[int, int]]) -> bool:
    return all(first < stop for first, stop in spans)


@lru_cache(maxsize=64)
def _program(spilled: SpilledPipeline) -> Program:
    stages = range(len(spilled.spans))
    return Program(tuple(spilled.actions(stage) for stage in stages))


@lru_cache(maxsize=64)
def _evaluation(spilled: SpilledPipeline) -> Program:
    stages = range(len(spilled.spans))
    return Program(tuple(tuple(_Stage(spilled, stage).forwards()) for stage in stages))


@lru_cache(maxsize=256)
def list_of(program: Program, stage: int) -> Program:
    """One device's list, as a program for the interpreter of one device."""
    return single(program.devices[stage])


class _Stage:
    """One device's list: what comes and goes, what it computes, and its messages."""

    def __init__(self, spilled: SpilledPipeline, stage: int) -> None:
        self._spilled, self._stage, self._pipeline = spilled, stage, spilled.pipeline
        self._first, stop = spilled.spans[stage]
        self._here, self._last = range(self._first, stop), stop - 1
        self._ends = stop == spilled.num_shards
        self._route = spilled.route(stage)

    def actions(self) -> Iterator[Action]:
        shape = Shape(self._route)
        units: list[Unit] = []
        for op, shard, micros in self._spilled.visits(self._stage):
            units += self._visit(shape, op, shard, micros)
        units += self._end(shape)
        return in_order(units, self._route)

    def forwards(self) -> Iterator[Action]:
        route = replace(self._route, optimizer="device", waits=(), saves=(), lookbehind=1)
        shape = Shape(route)
        units = [self._told(shape.forward(shard, (0,)), trains=False) for shard in self._here]
        return in_order(units, route)

    # -- units ----------------------------------------------------------------------------

    def _visit(self, shape: Shape, op: Op, shard: int, micros: tuple[int, ...]) -> Iterator[Unit]:
        if op is Op.F:
            yield self._told(shape.forward(shard, micros))
            return
        ends = micros[-1] + 1 == self._pipeline.num_micros
        steps = ends and not self._pipeline.clip
        units = (
            shape.backward_and_step(shard, micros) if steps else [shape.backward(shard, micros)]
        )
        backward, *step = units
        if self._spilled.sums_here and self._spilled.optimizer == "host":
            backward = _summed_here(backward, leaves=ends)
        yield from (self._told(backward), *step)

    def _end(self, shape: Shape) -> Iterator[Unit]:
        """After the last backward: the steps that wait for the norm, and what others are told."""
        if self._pipeline.clip:
            yield Unit(computes=tuple(self._norms()))
            yield from shape.late_steps(True, self._here)
        if told := (*self._lent(), *self._borrowed(), *self._last_rng()):
            yield Unit(computes=told)

    # -- messages -------------------------------------------------------------------------

    def _told(self, unit: Unit, *, trains: bool = True) -> Unit:
        """With what its units wait for before them, and what they hand on after them."""
        computes: list[Action] = []
        for action in unit.computes:
            is_unit = action.op in (Op.F, Op.B)
            computes += self._before(action, trains) if is_unit else ()
            computes.append(action)
            computes += self._after(action) if is_unit else ()
        return replace(unit, computes=tuple(computes))

    def _before(self, action: Action, trains: bool) -> Iterator[Action]:
        shard, micro = action.shard, action.micro or 0
        begins = action.op is Op.F or shard + 1 == self._spilled.num_shards
        if trains and begins and shard == 0 and micro and not self._pipeline.foretold:
            yield from self._rng_of(micro - 1)
        if begins and shard == self._first and self._stage:
            yield Action(Op.RECV, shard, micro, peer=self._stage - 1)
        if action.op is Op.B and shard == self._last and not self._ends:
            if self._pipeline.foretold:
                yield from self._rng_of(micro)
            yield Action(Op.RECV, shard + 1, micro, parts=GRAD, peer=self._stage + 1)

    def _after(self, action: Action) -> Iterator[Action]:
        shard, micro = action.shard, action.micro or 0
        if action.op is Op.F:
            if shard == self._last and not self._ends:
                yield Action(Op.SEND, shard + 1, micro, peer=self._stage + 1)
            return
        if shard + 1 == self._spilled.num_shards and self._pipeline.draws:
            yield Action(Op.SEND, shard, micro, parts=RNG, peer=0)
        if shard == self._first and self._stage:
            yield Action(Op.SEND, shard, micro, parts=GRAD, peer=self._stage - 1)

    def _rng_of(self, micro: int) -> Iterator[Action]:
        """The random state after a micro-batch, at stage 0."""
        if self._pipeline.draws and self._stage == 0:
            last, peer = self._spilled.num_shards - 1, len(self._spilled.spans) - 1
            yield Action(Op.RECV, last, micro, parts=RNG, peer=peer)

    def _last_rng(self) -> Iterator[Action]:
        if not self._pipeline.foretold:
            yield from self._rng_of(self._pipeline.num_micros - 1)

    def _norms(self) -> Iterator[Action]:
        if self._stage:
            yield from (Action(Op.SEND, shard, parts=NORM, peer=0) for shard in self._here)
            yield Action(Op.RECV, 0, parts=NORM, peer=0)
            return
        others = range(self._here.stop, self._spilled.num_shards)
        for shard in others:
            yield Action(Op.RECV, shard, parts=NORM, peer=self._spilled.stage_of(shard))
        yield Action(Op.SYNC)
        for stage in range(1, len(self._spilled.spans)):
            yield Action(Op.SEND, 0, parts=NORM, peer=stage)

    def _lent(self) -> Iterator[Action]:
        mine = {b for owner, b in self._spilled.ties if owner in self._here}
        for borrower in sorted(mine - set(self._here)):
            peer = self._spilled.stage_of(borrower)
            yield Action(Op.SEND, borrower, version=1, parts=PARAM, peer=peer)

    def _borrowed(self) -> Iterator[Action]:
        pairs = {
            (self._spilled.stage_of(owner), borrower)
            for owner, borrower in self._spilled.ties
            if borrower in self._here and owner not in self._here
        }
        for lender, borrower in sorted(pairs):
            yield Action(Op.RECV, borrower, version=1, parts=PARAM, peer=lender)


def _summed_here(backward: Unit, *, leaves: bool) -> Unit:
    """Gradients wait on the device, and leave it after the last micro-batch."""
    stays = () if leaves else GRAD
    return replace(
        backward,
        loads=_without(backward.loads, GRAD),
        stores=_without(backward.stores, stays),
        drops=_without(backward.drops, stays),
    )


def _without(parts: Iterable[Part], gone: Sequence[Part]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part not in gone)
