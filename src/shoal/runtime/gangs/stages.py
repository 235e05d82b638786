"""One stage of a trial on its device: what it computes, and what the stages tell each other.

The first stage leads (``seat``), and tells the others what comes next; each of them runs its
own list of the program that all of them make for themselves. What a list waits for are messages,
so a stage never holds up its device.

    stage 0   Join   Train ............ Train ...   Store              (control, to all others)
    stage 1          F0 F1 B0 B1 STEP   F0 ...      to the region, Known
    last             B0 B1 STEP  Loss   ...

Each stage keeps its own shard in the trial's one host region.
With copies of the pipeline member c * d + s is stage s of copy c: all of them train, validation
batches go to the copies in turn, and the first copy, which has what all have, writes.

[Note: buffers in an evaluation]
Where a model has buffers, the first validation batch of a lease goes to copy 0, whose stages say
whether evaluating it wrote to any. If so copy 0 evaluates alone: buffers are what one copy leaves.
If not, none may be written to afterwards.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shoal.core.errors import TrialError
from shoal.pipeline.lists import Lists
from shoal.pipeline.packing import Packer
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.stage import Compute
from shoal.pipeline.validate import BufferWrites, validation
from shoal.pipeline.wide import called, mean_in_order
from shoal.program.ir import Action, Op
from shoal.program.needs import message_kind
from shoal.recipes.recipe import Batch
from shoal.runtime.gangs.pipelined import PipelineSession
from shoal.runtime.gangs.seat import (
    CONTROL,
    NOTE,
    GangSeat,
    Join,
    Known,
    Store,
    Waiting,
)
from shoal.runtime.gangs.stage import Stage
from shoal.runtime.score import emulated_seconds, is_sampled
from shoal.runtime.task import Task

_LISTS = Lists()


@dataclass(frozen=True, slots=True)
class Train:
    """Run your list of this pipeline's program, after so many steps."""

    pipeline: Pipeline
    steps_before: int


Buffers = Literal["look", "refuse", "ignore"]
"""What a stage does about buffers that a validation batch writes to: say so, refuse, nothing."""


@dataclass(frozen=True, slots=True)
class Validate:
    """A validation batch comes, to the stages of this copy; its ``number`` in the pass."""

    number: int
    copy: int = 0
    buffers: Buffers = "ignore"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Metrics of a validation batch, from the last stage of a copy."""

    copy: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Looked:
    """Which buffers evaluating the first batch wrote to, at one stage."""

    written: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """Of a step, from the last stage of a copy: of each of its micro-batches."""

    copy: int
    values: tuple[float, ...]


class StageSeat(GangSeat):
    """A stage's place on a device for the time of a lease: see ``GangSeat``."""

    session: PipelineSession

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._settled: Stage | None = None
        width = self.session.technique.width
        self._evaluated: list[deque[Task]] = [deque() for _ in range(width)]  # by each copy
        self._dealt = 0  # validation batches of this pass
        self._looks: list[Looked] = []  # of the stages of copy 0
        self._known: list[Known] = []
        self._losses: dict[int, deque[tuple[float, ...]]] = {}  # of each copy, of its steps
        self._running: tuple[Pipeline, int] | None = None  # and the steps before it

    def _let_go(self) -> None:
        self._settled = None

    @property
    def _stage(self) -> Stage:
        assert self._settled is not None
        return self._settled

    @property
    def _place(self) -> tuple[int, int]:
        """Which copy of the pipeline this is of, and which stage of it."""
        return divmod(self.stage, self.session.stages)

    @property
    def called(self) -> str:
        """Its stage, and of several copies which one."""
        return called(self.stage, self.session.stages, self.session.technique.width)

    # -- its shard ----------------------------------------------------------------------------

    @property
    def _shards(self) -> Sequence[int]:
        """What of the model this stage has."""
        return (self._place[1],)

    def _settle(
        self,
        on_loss: Callable[[Sequence[float]], None],
        on_metrics: Callable[[dict[str, float]], None],
    ) -> Iterator[Waiting]:
        """Bring the shard to the device."""
        copy, stage = self._place
        self._settled = Stage(
            self.session, stage, self.device, on_loss=on_loss, on_metrics=on_metrics, copy=copy
        )
        return iter(())

    def _store(self, *, leaves: bool) -> Iterator[Waiting]:
        """Bring it to the region."""
        self._stage.store(leaves=leaves)
        return iter(())

    def _pipeline(self, groups: tuple[int, ...]) -> Pipeline:
        """What all stages run for the next steps; of the first stage."""
        return self._stage.pipeline(groups)

    # -- the first stage ----------------------------------------------------------------------

    def _lead(self) -> Generator[Waiting]:
        session = self.session
        self._tell(Join(session.progress()))
        yield from self._settle(_nothing, _nothing)
        yield None
        for task in session.tasks():
            if task.kind == "evaluation":
                yield from self._validate(task)
            elif task.kind == "metrics":
                yield from self._until(lambda: not any(self._evaluated))
                self._dealt = 0
            elif task.kind == "save":
                yield from self._gather(leaves=False)
                self.save()
            else:
                yield from self._train(task)
        yield from self._gather(leaves=True)

    def _train(self, task: Task) -> Iterator[Waiting]:
        session, before = self.session, self.session.step
        pipeline = self._pipeline(task.groups)
        self._tell(Train(pipeline, before))
        yield from self._run(pipeline, before)
        yield from self._until(lambda: session.step == before + len(task.groups))

    def _validate(self, task: Task) -> Iterator[Waiting]:
        """Not more of them under way at a copy than it has stages."""
        stages, order = self.session.stages, self._next_validation()
        waiting = self._evaluated[order.copy]
        yield from self._until(lambda: len(waiting) < stages)
        waiting.append(task)
        for stage in range(stages):
            if member := order.copy * stages + stage:
                self.links.send(member, CONTROL, order)
        batch = task.batches.pop(0)  # not held until the pass ends
        yield from self._evaluate(order, batch)
        if order.buffers == "look":
            yield from self._until(lambda: len(self._looks) == stages)

    def _next_validation(self) -> Validate:
        """Which copy evaluates the next batch; see [Note: buffers in an evaluation]."""
        width, number = self.session.technique.width, self._dealt
        self._dealt += 1
        has_buffers = any(True for _ in self.session.model.buffers())
        if has_buffers and width > 1 and not self._looks:
            return Validate(number, buffers="look")
        if any(look.written for look in self._looks):
            return Validate(number)
        return Validate(number, number % width, "refuse" if self._looks else "ignore")

    def _gather(self, *, leaves: bool) -> Iterator[Waiting]:
        """Have all shards in the region, and know the rest of the optimizer's state."""
        session = self.session
        self._tell(Store(session.step, leaves, session.ended))
        yield from self._store(leaves=leaves)
        yield from self._until(lambda: len(self._known) == len(self._others))
        for known in self._known:
            session.learn(known.scalars, known.stored)
            session.learn_options(known.options, but=self._shards)
            session.python.learn(known.python)
        self._known.clear()

    def _take_note(self, note: object) -> None:
        match note:
            case Loss():
                self._count_step(note)
            case Evaluated():
                self._evaluated[note.copy].popleft().metrics.update(note.metrics)
            case Looked():
                self._looks.append(note)
            case Known():
                self._known.append(note)

    def _count_step(self, note: Loss) -> None:
        """A step's loss is the mean over its micro-batches, when all copies have said theirs."""
        said, width = self._losses, self.session.technique.width
        said.setdefault(note.copy, deque()).append(note.values)
        if len(said) == width and all(said.values()):
            self.session.count_step(mean_in_order([said[c].popleft() for c in range(width)]))

    # -- the others ---------------------------------------------------------------------------

    def _follow(self) -> Generator[Waiting]:
        leaves = False
        yield self._is_told
        join = self.links.take(0, CONTROL)
        placed = self._hands.place(self.session, join.progress)
        assert isinstance(placed, PipelineSession)
        self.session = session = placed
        self.links.know(Packer(dict(session.model.named_parameters())))
        session.python.put()  # as before its chain was looked for
        session.python.mark()
        copy, _ = self._place
        yield from self._settle(
            lambda losses: self.links.send(0, NOTE, Loss(copy, tuple(losses))),
            lambda metrics: self.links.send(0, NOTE, Evaluated(copy, metrics)),
        )
        while not leaves:
            yield self._is_told
            match order := self.links.take(0, CONTROL):
                case Train():
                    session.step = order.steps_before
                    yield from self._run(order.pipeline, order.steps_before)
                    session.step += len(order.pipeline.groups)
                case Validate():
                    yield from self._evaluate(order, None)
                case Store():
                    session.step, session.has_ended = order.step, order.ended
                    leaves = order.leaves
                    yield from self._store(leaves=leaves)
                    self.links.send(0, NOTE, Known({}, {}) if copy else self._what_is_known())

    def _what_is_known(self) -> Known:
        session = self.session
        options = session.binding.options_of(*self._shards)
        return Known(*session.known_of(*self._shards), options, session.python.since())

    # -- programs -----------------------------------------------------------------------------

    def _run(self, pipeline: Pipeline, steps_before: int) -> Iterator[Waiting]:
        """This stage's list of a pipeline's program."""
        stage, self._running = self._stage, (pipeline, steps_before)
        counts = not self.session.compiled
        if counts and not (self._has_counted and not is_sampled(steps_before)):
            stage.count()
        actions = _LISTS.of(pipeline, self.stage)
        yield from self._play(stage.begin(pipeline, steps_before), actions)
        stage.end(pipeline)
        self._running = None
        self._report_peak(stage.counted_peak())

    def _evaluate(self, order: Validate, batch: Batch | None) -> Iterator[Waiting]:
        with self.session.validating.at(order.number):
            yield from self._pass_on(order, batch)

    def _pass_on(self, order: Validate, batch: Batch | None) -> Iterator[Waiting]:
        """This stage's part of a validation batch, which the first one has."""
        session, watch = self.session, None
        if order.buffers != "ignore" and self._place[0] == order.copy:
            watch = BufferWrites(session.model)
        program = validation(session.stages, session.technique.width, order.copy)
        yield from self._play(self._stage.validation(batch), program.devices[self.stage])
        if watch is not None:
            self._say(order, tuple(watch.found()))

    def _say(self, order: Validate, written: tuple[str, ...]) -> None:
        """Which buffers a validation batch wrote to.

        Raises:
            TrialError: the first one of the lease wrote to none, so that every copy evaluates.
        """
        if order.buffers == "look" and self.stage:
            self.links.send(0, NOTE, Looked(written))
        elif order.buffers == "look":
            self._looks.append(Looked(written))
        elif written:
            width = self.session.technique.width
            raise TrialError(
                f"evaluating a batch wrote to the buffer {written[0]!r}, which the first "
                f"validation batch did not: {width} copies of the pipeline evaluate other "
                "batches, and each would have its own. Use width=1, or have no buffer change in "
                "eval()."
            )

    def _play(self, compute: Compute, actions: Iterable[Action]) -> Iterator[Waiting]:
        for action in actions:
            if self.stage == 0:
                self._hear()
            if action.op is Op.RECV:
                line = (action.peer or 0, message_kind(action))
                yield from self._await(*line)
                with self._stage.counted():
                    compute.take(action, self.links.take(*line))
            elif action.op is Op.SEND:
                with self._stage.counted():
                    given = compute.give(action)
                self.links.send(action.peer or 0, message_kind(action), given, widely=True)
                del given  # it is on its way, and a unit may follow that takes long
            else:
                self._run_action(compute, action)
                yield None

    def _await(self, peer: int, kind: int) -> Iterator[Waiting]:
        """Until a message is here; the first stage hears what else is said."""
        came = functools.partial(self.links.has, peer, kind)
        while not came():
            if self.stage:
                yield came
            else:
                yield lambda: came() or self._has_heard()
                self._hear()

    def _step_of(self, action: Action) -> int:
        if self._running is None:
            return super()._step_of(action)
        pipeline, before = self._running  # the first stage counts a step when it hears its loss
        group = action.version if action.micro is None else pipeline.group_of(action.micro)
        return before + 1 + max(0, group - pipeline.begun)

    def _run_action(self, compute: Compute, action: Action) -> None:
        def work() -> None:
            with self._stage.counted():
                compute.run(action)

        self._compute(action, work, self._seconds(action))
        if action.op is Op.STEP and self._stage.has_counted_enough:
            self._report_peak(self._stage.counted_peak())

    def _seconds(self, action: Action) -> float | None:
        """How long an action shall take where the device is emulated."""
        shard = self.job.shards[self._place[1]]
        return emulated_seconds(action, shard, self.device.spec.profile)


def _nothing(value: object) -> None:
    """The first stage hears of losses and metrics from the last one."""
