"""A stage of a trial that is spilled: its shards come and go on its device, as those of a trial
that is spilled on one device do.

A spilled stage is a seat (``interpret``) that its gang drives: one list with the copies of its
shards, its units and its messages. Where the list waits for a message, what was issued before goes
on, and the device computes for others. All of a stage's shards live in the trial's one region: a
step on the host, or a STORE, writes there, and nowhere else is anything of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shoal.core.technique import kept_shards
from shoal.device import Device
from shoal.memory.layout import stage_arena
from shoal.partition.chain import Chain
from shoal.pipeline.build import shares_of, ties_of
from shoal.pipeline.links import Links
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.spilled import SpilledPipeline, list_of
from shoal.program.ir import Program
from shoal.recipes.recipe import Batch
from shoal.rng import restore_rng
from shoal.runtime.beside import counted
from shoal.runtime.gangs.pipelined import PipelineSession
from shoal.runtime.gangs.seat import Waiting
from shoal.runtime.gangs.spilledcompute import SpilledCompute
from shoal.runtime.gangs.stage import BufferWatch, look_at_draws
from shoal.runtime.gangs.stages import StageSeat, Validate
from shoal.runtime.interpret import Seat
from shoal.runtime.score import is_sampled
from shoal.runtime.task import Issued, Task
from shoal.spill.generate import arrival, departure


class SpilledStage:
    """The shards of one stage, on their device as far as they are there.

    Args:
        session: The trial, placed in its region and at the step that it goes on from.
        record: Called with every action that was issued.
        on_loss: Told the losses of each step's micro-batches, on the last stage.

    Attributes:
        seat: What issues its actions.
        here: Its shards.
    """

    def __init__(
        self,
        session: PipelineSession,
        index: int,
        device: Device,
        *,
        links: Links,
        record: Callable[[Issued], None],
        on_loss: Callable[[Sequence[float]], None],
    ) -> None:
        self._session, self._index = session, index
        self._chain: Chain = session.units.chain
        self.here = range(*session.spans[index])
        cuts = tuple(shard.layers[0] for shard in session.job.shards[1:])
        self._ties = ties_of(shares_of(self._chain, cuts, len(session.job.shards)))
        compute = functools.partial(SpilledCompute, index=index, links=links, on_loss=on_loss)
        technique, clip = session.technique, session.recipe.clip_grad_norm is not None
        self.seat = Seat(
            session,
            device,
            None,
            arena=stage_arena(session.layout, technique, self.here, clip=clip),
            record=record,
            make_compute=compute,
        )
        assert isinstance(self.seat.compute, SpilledCompute)
        self._compute = self.seat.mail = self.seat.compute
        self._buffers = BufferWatch(session.model)
        session.before_lent = self.seat.drain

    def close(self) -> None:
        """Free what is on the device."""
        self._session.before_lent = lambda: None
        self.seat.close()

    # -- coming and going -----------------------------------------------------------------

    @property
    def _staying(self) -> tuple[int, ...]:
        return tuple(s for s in kept_shards(self._session.technique) if s in self.here)

    def coming(self) -> Task | None:
        """Brings what stays on the device."""
        return Task(arrival(self._staying), "arrival") if self._staying else None

    def bind_staying(self) -> None:
        """Point what stays at its place: the first batch is looked at before any unit."""
        for shard in self._staying:
            self._session.binding.bind(shard, self._compute.placed[shard])

    def going(self) -> Task | None:
        """Takes it to the host."""
        return Task(departure(self._staying), "departure") if self._staying else None

    def rest(self, *, leaves: bool) -> None:
        """Nothing is in flight: have all that changed in the region, and let go if it leaves."""
        session, seat = self._session, self.seat
        seat.drain()
        if not leaves:
            seat.copies.copy_kept()
        session.put_buffers_back(self._buffers.changed())
        if leaves:
            for shard in self.here:
                session.binding.bind(shard, seat.host[shard])
            session.evict_everything()

    # -- programs -------------------------------------------------------------------------

    def pipeline(self, groups: tuple[int, ...]) -> Pipeline:
        """What all stages run for the next step; of the first stage."""
        stop = self._session.job.shards[0].layers[1]
        session = self._session
        if session.draws is None:
            look = functools.partial(look_at_draws, session, self._chain, stop)
            counted(self.seat, look, "the first batch")
        session.refuse_mixed_draws()
        return session.pipeline(groups)

    def step(self, pipeline: Pipeline) -> Task:
        """This stage's list of a step."""
        self._session.model.train()
        self._compute.begin_step(pipeline, self._session.foretelling)
        number = self._session.step + 1  # the first stage hears of the loss while its list goes on
        return Task(self._list(self._spilled(pipeline).program()), "step", step=number)

    def end_step(self, pipeline: Pipeline) -> None:
        """The list is issued, and has computed."""
        if self._index == 0 and pipeline.draws:
            restore_rng(self._compute.end_rng, self._session.device)
        self.seat.end_step()

    def validation(self, batch: Batch | None) -> Task:
        """This stage's part of a validation batch; of the first stage its batch too."""
        session, technique = self._session, self._session.technique
        session.model.eval()
        one = Pipeline(schedule=technique.known_schedule, stages=session.stages, groups=(1,))
        batches = {} if batch is None else {0: batch}
        return Task(self._list(self._spilled(one).evaluation()), "evaluation", batches=batches)

    def _list(self, program: Program) -> Program:
        return list_of(program, self._index)

    def _spilled(self, pipeline: Pipeline) -> SpilledPipeline:
        technique = self._session.technique
        assert technique.optimizer is not None
        return SpilledPipeline(
            pipeline=pipeline,
            spans=self._session.spans,
            optimizer=technique.optimizer,
            lookahead=technique.lookahead or 0,
            keep=technique.keep or (),
            keep_gradients=bool(technique.keep_gradients),
            ties=self._ties,
        )


class SpilledStageSeat(StageSeat):
    """A spilled stage's place on a device for the time of a lease: see ``GangSeat``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._spilled: SpilledStage | None = None
        self._calms = False  # it waits for what is in flight here
        self._on_metrics: Callable[[dict[str, float]], None] = lambda values: None

    def _let_go(self) -> None:
        if self._spilled is not None:
            self._spilled.close()
            self._spilled = None

    @property
    def waits_here(self) -> bool:
        if self._spilled is None or self.device.spec.kind == "cuda":  # nobody says when it is over
            return self._calms
        return not self._spilled.seat.is_quiet

    @property
    def _here(self) -> SpilledStage:
        assert self._spilled is not None
        return self._spilled

    @property
    def _shards(self) -> Sequence[int]:
        return self._here.here

    def _settle(
        self,
        on_loss: Callable[[Sequence[float]], None],
        on_metrics: Callable[[dict[str, float]], None],
    ) -> Iterator[Waiting]:
        self._on_metrics = on_metrics
        self._spilled = SpilledStage(
            self.session,
            self.stage,
            self.device,
            links=self.links,
            record=self._hands.record,
            on_loss=on_loss,
        )
        self._here.seat.reserve_units = self._make_room
        yield from self._drive(self._here.coming())
        self._here.bind_staying()

    def _make_room(self) -> None:
        """A unit took more than was measured."""
        self.unit_bytes = self._here.seat.unit_bytes
        self._hands.room()

    def _store(self, *, leaves: bool) -> Iterator[Waiting]:
        yield from self._calm()
        if leaves:
            yield from self._drive(self._here.going())
            yield from self._calm()
        self._here.rest(leaves=leaves)

    def _calm(self) -> Iterator[Waiting]:
        """Until nothing is in flight; others compute meanwhile."""
        seat = self._here.seat
        if not seat.is_quiet:
            seat.wake_when_quiet()
            self._calms = True
            yield lambda: seat.is_quiet
            self._calms = False
        seat.drain()

    def _pipeline(self, groups: tuple[int, ...]) -> Pipeline:
        return self._here.pipeline(groups)

    # -- programs -----------------------------------------------------------------------------

    def _run(self, pipeline: Pipeline, steps_before: int) -> Iterator[Waiting]:
        stage, seat = self._here, self._here.seat
        yield from self._drive(stage.step(pipeline))
        stage.end_step(pipeline)
        if seat.track:
            self._hands.on_peak(seat.peak_bytes)
        seat.track = seat.counts and is_sampled(steps_before + 1)

    def _pass_on(self, order: Validate, batch: Batch | None) -> Iterator[Waiting]:
        task = self._here.validation(batch)
        yield from self._drive(task)
        if self.stage + 1 == self.session.stages:
            self._on_metrics(task.metrics)

    def _drive(self, task: Task | None) -> Iterator[Waiting]:
        """Run a task, a unit at a time; copies and messages go on before others compute."""
        seat = self._here.seat
        if task is not None:
            seat.start(task)
        while seat.head is not None:
            if self.stage == 0:
                self._hear()
            seat.issue_copies()
            if seat.waits_for_compute and seat.startable():
                seat.issue_compute()
                seat.issue_copies()
                yield None
            elif seat.head is not None:
                yield self._may_go_on

    def _may_go_on(self) -> bool:
        seat = self._here.seat
        if self.stage == 0 and self._has_heard():
            return True
        return seat.may_issue
