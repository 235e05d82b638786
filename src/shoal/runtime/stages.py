"""One stage of a trial on its device: what it computes, and what the stages tell each other.

[Note: who says what]
The first stage leads. It goes through the trial's loop (``Session.tasks``) and tells the others
what comes next; each of them runs its own list of the program that all of them make for
themselves. What a list waits for are messages, so a stage never holds up its device: it is a
generator that yields what it waits for, and the device's loop computes for other trials
meanwhile.

    stage 0   Join   Train ............ Train ...   Store              (control, to all others)
    stage 1          F0 F1 B0 B1 STEP   F0 ...      to the region, Known
    last             B0 B1 STEP  Loss   ...

The host region is one for all stages: each keeps its own shard there. The first stage fills it
before it says Join, and reads it when all others have said Known.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from shoal.core.errors import CapacityError, WorkerError
from shoal.core.units import Bytes, format_bytes
from shoal.device import Device
from shoal.device.flops import step_bytes
from shoal.memory.ledger import Ledger
from shoal.memory.store import Region
from shoal.pipeline.links import Links
from shoal.pipeline.packing import Packer
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.stage import Compute
from shoal.pipeline.validate import validation
from shoal.program.costs import unit_seconds
from shoal.program.ir import Action, Op, Program
from shoal.program.needs import message_kind
from shoal.recipe import Batch
from shoal.rng import capture_rng, restore_rng
from shoal.runtime.interpret import Issued, is_sampled
from shoal.runtime.messages import Progress
from shoal.runtime.pipelined import PipelineSession, Scalars, Stored
from shoal.runtime.session import Task
from shoal.runtime.stage import Stage

CONTROL, NOTE = 16, 17  # kinds of messages that are no action's
Waiting = Callable[[], bool] | None
"""What a stage waits for: asked until it is true. None: for nothing but its turn."""


@dataclass(frozen=True, slots=True)
class Join:
    """The region is filled: take your stage from it."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class Train:
    """Run your list of this pipeline's program, after so many steps."""

    pipeline: Pipeline
    steps_before: int


@dataclass(frozen=True, slots=True)
class Validate:
    """A validation batch comes."""


@dataclass(frozen=True, slots=True)
class Store:
    """Bring your shard to the region and say Known; then leave, if it says so."""

    step: int
    leaves: bool
    ended: bool


@dataclass(frozen=True, slots=True)
class Loss:
    """Of a step, from the last stage."""

    value: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """Of a validation batch, from the last stage."""

    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Known:
    """A shard is in the region; the rest of its optimizer's state."""

    scalars: Scalars
    stored: Stored


@dataclass(frozen=True, slots=True)
class Failed:
    """A later stage cannot go on; it has let go of everything."""

    error: str  # the traceback
    cause: Exception | None  # where it is shoal's own


class StageError(Exception):
    """What another stage failed with, as the first one hears it."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.error)
        self.failed = failed


class StageSeat:
    """A stage's place on a device for the time of a lease. Use from the device's own thread.

    Args:
        session: The trial; placed in its region on the first stage, on others not yet.
        place: Places a later stage's session, with what the first one tells it.
        record: Called with every action that ran.
        room: Called when ``unit_bytes`` has grown: the device reserves anew.
        on_peak: Told the most bytes that the stage held, where they were counted.

    Attributes:
        left: Its shard is in the region, and its memory on the device is free.
    """

    def __init__(
        self,
        session: PipelineSession,
        stage: int,
        device: Device,
        ledger: Ledger,
        region: Region,
        links: Links,
        *,
        place: Callable[[PipelineSession, Progress], PipelineSession],
        record: Callable[[Issued], None],
        room: Callable[[], None],
        on_peak: Callable[[int], None],
    ) -> None:
        self.session, self.stage, self.device, self.links = session, stage, device, links
        self.trial, self.job = session.job.trial, session.job
        self._place, self._record, self._room, self._on_peak = place, record, room, on_peak
        self._region = region
        self._ledger, self._owner = ledger, f"trial {self.trial}"
        ledger.reserve(self._owner, self.job.held_bytes)
        self.unit_bytes = self.job.unit_bytes
        self.save: Callable[[], None] = lambda: None  # takes the state that is in the region
        self.left = False
        self._settled: Stage | None = None
        self._metrics: deque[Task] = deque()
        self._known: list[Known] = []
        self._has_counted = False  # a step's allocations, in this lease
        self._script = self._lead() if stage == 0 else self._follow()
        self._waiting: Waiting = None

    # -- for the device's loop --------------------------------------------------------------

    def ready(self) -> bool:
        """Whether it could go on. What a lost stage owes never comes: the study sees to that."""
        try:
            return not self.left and (self._waiting is None or self._waiting())
        except WorkerError:
            return True  # whoever asks again fails

    def advance(self) -> None:
        """Go on to the end of a unit, or to where it waits for another stage."""
        leads = self.stage == 0
        if leads:
            restore_rng(self.session.rng, self.device.torch_device)
        try:
            self._waiting = next(self._script)
        except StopIteration:
            self.left = True
        if leads:
            self.session.rng = capture_rng(self.device.torch_device)

    def tell_failure(self, error: str, cause: Exception | None) -> None:
        """Have the first stage say what happened here, after all that it has to say before."""
        self.left = True
        try:
            self.links.send(0, NOTE, Failed(error, cause))
        except Exception:  # an error that cannot travel
            self.links.send(0, NOTE, Failed(error, None))

    def close(self) -> None:
        """Give everything back; stages that are still here see that this one is gone."""
        self._script.close()
        if self.left:
            self.links.close()
        else:
            self.links.cut()
        self._settled = None
        self.device.synchronize()
        self._region.unpin()
        self._ledger.release(self._owner)

    @property
    def _stage(self) -> Stage:
        assert self._settled is not None
        return self._settled

    # -- the first stage ----------------------------------------------------------------------

    def _lead(self) -> Generator[Waiting]:
        session = self.session
        self._tell(Join(session.progress()))
        self._settled = Stage(session, 0, self.device, on_loss=_nothing, on_metrics=_nothing)
        yield None
        for task in session.tasks():
            if task.kind == "evaluation":
                yield from self._validate(task)
            elif task.kind == "metrics":
                yield from self._until(lambda: not self._metrics)
            elif task.kind == "save":
                yield from self._gather(leaves=False)
                self.save()
            else:
                yield from self._train(task)
        yield from self._gather(leaves=True)

    def _tell(self, control: object) -> None:
        for peer in range(1, self.session.stages):
            self.links.send(peer, CONTROL, control)

    def _train(self, task: Task) -> Iterator[Waiting]:
        session, before = self.session, self.session.step
        pipeline = self._stage.pipeline(task.groups)
        self._tell(Train(pipeline, before))
        yield from self._run(pipeline, before)
        yield from self._until(lambda: session.step == before + len(task.groups))

    def _validate(self, task: Task) -> Iterator[Waiting]:
        """Not more of them under way than there are stages."""
        yield from self._until(lambda: len(self._metrics) < self.session.stages)
        self._metrics.append(task)
        self._tell(Validate())
        yield from self._pass_on(task.batches[0])

    def _gather(self, *, leaves: bool) -> Iterator[Waiting]:
        """Have all shards in the region, and know the rest of the optimizer's state."""
        session = self.session
        self._tell(Store(session.step, leaves, session.ended))
        self._stage.store(leaves=leaves)
        yield from self._until(lambda: len(self._known) == session.stages - 1)
        for known in self._known:
            session.learn(known.scalars, known.stored)
        self._known.clear()

    def _until(self, done: Callable[[], bool]) -> Iterator[Waiting]:
        """Hear what the others say until then."""
        self._hear()
        while not done():
            yield self._has_heard
            self._hear()

    def _has_heard(self) -> bool:
        return any(self.links.has(peer, NOTE) for peer in range(1, self.session.stages))

    def _hear(self) -> None:
        for peer in range(1, self.session.stages):
            while self.links.has(peer, NOTE):
                match note := self.links.take(peer, NOTE):
                    case Loss():
                        self.session.count_step(note.value)
                    case Metrics():
                        self._metrics.popleft().metrics.update(note.values)
                    case Known():
                        self._known.append(note)
                    case Failed():
                        raise StageError(note)

    # -- the others ---------------------------------------------------------------------------

    def _follow(self) -> Generator[Waiting]:
        leaves = False
        yield self._is_told
        join = self.links.take(0, CONTROL)
        self.session = session = self._place(self.session, join.progress)
        self.links.know(Packer(dict(session.model.named_parameters())))
        self._settled = Stage(
            session,
            self.stage,
            self.device,
            on_loss=lambda loss: self.links.send(0, NOTE, Loss(loss)),
            on_metrics=lambda values: self.links.send(0, NOTE, Metrics(values)),
        )
        while not leaves:
            yield self._is_told
            match order := self.links.take(0, CONTROL):
                case Train():
                    session.step = order.steps_before
                    yield from self._run(order.pipeline, order.steps_before)
                case Validate():
                    yield from self._pass_on(None)
                case Store():
                    session.step, session.has_ended = order.step, order.ended
                    leaves = order.leaves
                    self._stage.store(leaves=leaves)
                    self.links.send(0, NOTE, Known(*session.known_of(self.stage)))

    def _is_told(self) -> bool:
        return self.links.has(0, CONTROL)

    # -- programs -----------------------------------------------------------------------------

    def _run(self, pipeline: Pipeline, steps_before: int) -> Iterator[Waiting]:
        """This stage's list of a pipeline's program."""
        stage = self._stage
        counts = not self.session.compiled
        if counts and not (self._has_counted and not is_sampled(steps_before)):
            stage.count()
        yield from self._play(stage.begin(pipeline, steps_before), _program(pipeline))
        stage.end(pipeline)
        self._report_peak()

    def _pass_on(self, batch: Batch | None) -> Iterator[Waiting]:
        """This stage's part of a validation batch, which the first one has."""
        program = validation(self.session.stages)
        yield from self._play(self._stage.validation(batch), program)

    def _play(self, compute: Compute, program: Program) -> Iterator[Waiting]:
        for action in program.devices[self.stage]:
            if self.stage == 0:
                self._hear()
            if action.op is Op.RECV:
                line = (action.peer or 0, message_kind(action))
                yield from self._await(*line)
                with self._stage.counted():
                    compute.take(action, self.links.take(*line))
            elif action.op is Op.SEND:
                self.links.send(action.peer or 0, message_kind(action), compute.give(action))
            else:
                self._compute(compute, action)
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

    def _compute(self, compute: Compute, action: Action) -> None:
        def work() -> None:
            with self._stage.counted():
                compute.run(action)

        event = self.device.compute(work, seconds=self._seconds(action))
        step = self.session.step + 1
        self._record(Issued("compute", str(action), event, 0, step, self.trial))
        if event.error is not None:
            raise event.error
        if action.op is Op.STEP and self._stage.has_counted_enough:
            self._report_peak()

    def _seconds(self, action: Action) -> float | None:
        """How long an action shall take where the device is emulated."""
        profile, shard = self.device.spec.profile, self.job.shards[self.stage]
        if profile is None or action.op is Op.SYNC:
            return None
        if action.op is Op.STEP:
            return profile.memory_seconds(step_bytes(shard))
        return unit_seconds(action, shard)

    def _report_peak(self) -> None:
        """Tell what was counted; reserve more where a unit took more than was measured.

        Raises:
            CapacityError: there is no room for that.
        """
        if (peak := self._stage.counted_peak()) is None:
            return
        self._has_counted = True
        self._on_peak(peak)
        planned = self.job.held_bytes + self.unit_bytes
        if peak <= planned:
            return
        self.unit_bytes = Bytes(peak - self.job.held_bytes)
        try:
            self._room()
        except CapacityError as error:
            outgrown = CapacityError(
                f"stage {self.stage} of trial {self.trial} took {format_bytes(Bytes(peak))} on "
                f"{self.device.spec.name}, {format_bytes(Bytes(planned))} were reserved for it, "
                f"and there is no room for the rest: {error} Where batches differ in size, let "
                "the first one be the largest: it is the one that is measured."
            )
            outgrown.growth = peak / planned
            raise outgrown from None


@functools.lru_cache(maxsize=32)
def _program(pipeline: Pipeline) -> Program:
    """Made once for steps that are alike."""
    return pipeline.program()


def _nothing(value: object) -> None:
    """The first stage hears of losses and metrics from the last one."""
