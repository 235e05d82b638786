"""A replica's place on a device: what replicas tell each other, beside torch's own messages.

The first replica leads (``seat``): it reads a batch, cuts it, and gives each its rows. Then
all of them compute, and DDP or FSDP2 has them wait for each other inside a unit, which holds up
the device. So no two trials with replicas may be on one device at a time: a study has them one
after the other. What ends a step is that every replica says END to every other one, with its
losses; with FSDP2 so does each batch, with the parameters that it used, and each validation batch.

    replica 0   Join   Steps  rows->  B0 rows-> B1  END  STEP  ...  Store
    replica 1                  B0         B1        END  STEP       Known
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from shoal.core.units import Bytes
from shoal.device.flops import step_bytes
from shoal.partition.build import clone_batch
from shoal.program.ir import Action, Op
from shoal.recipes.recipe import Batch
from shoal.replicas import Piece, cut_for_replicas, stream_seed
from shoal.rng import seed_all
from shoal.runtime.gangs.group import GangGroup, LinkedWays, PeerLost, joined, other_way
from shoal.runtime.gangs.replica import Replica
from shoal.runtime.gangs.replicated import ReplicaSession
from shoal.runtime.gangs.seat import (
    CONTROL,
    NOTE,
    GangSeat,
    Join,
    Known,
    MemberError,
    Metrics,
    Store,
    Waiting,
)
from shoal.runtime.score import emulated_seconds, is_sampled
from shoal.runtime.task import Task

ROWS = 18  # the kind of messages that bring a replica its rows


@dataclass(frozen=True, slots=True)
class Steps:
    """Rows of so many batches come, for one step, after so many."""

    batches: int
    steps_before: int


@dataclass(frozen=True, slots=True)
class Validate:
    """A validation batch for you, and its ``number`` in the pass. None: nothing to do."""

    batch: Batch | None
    number: int
    counts: bool  # False: only to gather with the others


class ReplicaSeat(GangSeat):
    """A replica's place on a device for the time of a lease: see ``GangSeat``."""

    session: ReplicaSession

    @property
    def called(self) -> str:
        """Its number."""
        return f"replica {self.stage}"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._joined = ExitStack()
        self._settled: Replica | None = None
        self._ways: LinkedWays | None = None
        self._evaluated: list[Task] = []  # those that are evaluated now
        self._round: list[Task] = []  # validation batches that wait for others
        self._dealt = 0  # validation batches of this pass
        self._answers = 0  # that are to come
        self._known = 0

    def _let_go(self) -> None:
        settled, self._settled = self._settled, None
        if settled is not None:
            settled.close()
        self._joined.close()
        self._ways = None  # it knows this seat, and whoever has the group knows it
        if settled is not None and self.session.technique.shard:
            settled = None
            gc.collect()  # FSDP2's modules know each other: shards would stay for a while

    @property
    def _replica(self) -> Replica:
        assert self._settled is not None
        return self._settled

    def _settle(self) -> None:
        """Be one of the group, with this replica's part of the state."""
        ways = self._ways = LinkedWays(self.links, self._hold)
        group = GangGroup(self.stage, self.session.members, ways)
        self._joined.enter_context(joined(group))
        self._settled = Replica(self.session, self.stage, self.device)

    def _hold(self, done: Any) -> None:
        """Hold the device up until then, and say that this is no hang."""
        while True:
            seen = self.device.version
            if done():
                return
            with self.device.progress:
                if self.device.version == seen:
                    self.device.progress.wait(timeout=1.0)
            self._hands.waits()

    def _lead(self) -> Generator[Waiting]:
        yield from self._unless_lost(self._led())

    def _follow(self) -> Generator[Waiting]:
        yield from self._unless_lost(self._followed())

    def _unless_lost(self, script: Iterator[Waiting]) -> Generator[Waiting]:
        """Where a peer is gone nothing goes on: the study says what becomes of the trial.

        Also where an error may come of that: whoever is gone had the first one.
        """
        try:
            yield from script
        except MemberError:
            raise  # that one has said itself what it failed with
        except Exception as error:
            lost = isinstance(error, PeerLost) or any(map(self.links.gone, self._others))
            if not lost:
                raise
            self._let_go()
            if self.stage == 0:
                yield from self._until(lambda: False)
            while True:
                yield lambda: False

    # -- the first one --------------------------------------------------------------------

    def _led(self) -> Iterator[Waiting]:
        session = self.session
        self._tell(Join(session.progress()))
        self._settle()
        yield None
        for task in session.tasks():
            if task.kind == "evaluation":
                task.batches[0] = clone_batch(task.batches[0])  # a source may reuse it
                self._round.append(task)
                if len(self._round) == session.members:
                    yield from self._validate()
            elif task.kind == "metrics":
                yield from self._validate()
                self._dealt = 0
            elif task.kind == "save":
                yield from self._gather(leaves=False)
                self.save()
            else:
                yield from self._train(task.groups[0])
        yield from self._gather(leaves=True)

    def _train(self, batches: int) -> Iterator[Waiting]:
        session = self.session
        self._tell(Steps(batches, session.step))
        losses = yield from self._step(batches)
        session.count_step(losses)

    def _deal(self) -> Piece:
        """Read a batch and give the others their rows; returns this one's."""
        pieces = cut_for_replicas(self.session.next_batch(), self.session.members)
        for peer in self._others:
            self.links.send(peer, ROWS, tuple(pieces[peer]))
        return pieces[0]

    def _validate(self) -> Iterator[Waiting]:
        """A validation batch for each replica, as far as there are any."""
        tasks, self._round = self._round, []
        if not tasks:
            return
        batches = [task.batches.pop(0) for task in tasks]  # not held until the pass ends
        needs_all = self.session.technique.shard  # who has none helps to gather, with the first
        for peer in self._others:
            counts = peer < len(tasks)
            batch = batches[peer] if counts else batches[0] if needs_all else None
            number = self._dealt + peer * counts
            self.links.send(peer, CONTROL, Validate(batch, number, counts))
        self._evaluated, self._answers = tasks, len(tasks) - 1
        self._share_buffers(self._dealt)
        yield None
        tasks[0].metrics.update(self._evaluate(batches[0], self._dealt))
        self._dealt += len(tasks)
        yield from self._until(lambda: not self._answers)

    def _gather(self, *, leaves: bool) -> Iterator[Waiting]:
        """Have all of the state in the region."""
        session = self.session
        self._tell(Store(session.step, leaves, session.ended))
        self._replica.store(leaves=leaves)
        yield from self._until(lambda: self._known == len(self._others))
        self._known = 0

    def _take_note(self, note: object) -> None:
        match note:
            case (int(peer), Metrics(values)):
                self._evaluated[peer].metrics.update(values)
                self._answers -= 1
            case Known():
                self._known += 1

    # -- the others -----------------------------------------------------------------------

    def _followed(self) -> Iterator[Waiting]:
        leaves = False
        yield self._is_told
        join = self.links.take(0, CONTROL)
        placed = self._hands.place(self.session, join.progress)
        assert isinstance(placed, ReplicaSession)
        self.session = placed
        self._settle()
        while not leaves:
            yield self._is_told
            match order := self.links.take(0, CONTROL):
                case Steps():
                    self.session.step = order.steps_before
                    yield from self._step(order.batches)
                    self.session.step += 1
                case Validate():
                    self._answer(order)
                case Store():
                    self.session.step, self.session.has_ended = order.step, order.ended
                    leaves = order.leaves
                    self._replica.store(leaves=leaves)
                    self.links.send(0, NOTE, Known({}, {}))

    def _answer(self, order: Validate) -> None:
        self._share_buffers(order.number)
        if order.batch is None:
            return
        found = self._evaluate(order.batch, order.number)
        if order.counts:
            self.links.send(0, NOTE, (self.stage, Metrics(found)))

    # -- both -----------------------------------------------------------------------------

    def _share_buffers(self, number: int) -> None:
        """With the first validation batches of a pass."""
        if number < self.session.members:
            self._replica.begin_evaluation()

    def _evaluate(self, batch: Batch, number: int) -> dict[str, float]:
        """A validation batch; with FSDP2 whoever is through has no more to gather."""
        with self.session.validating.at(number):
            found = self._replica.evaluate(batch)
        if self.session.technique.shard:
            self._end(None)
        return found

    def _step(self, batches: int) -> Generator[Waiting, None, float]:
        """A step of this replica's; returns the loss of all of them."""
        session, replica = self.session, self._replica
        if not (self._has_counted and not is_sampled(session.step)):
            replica.count()
        weighted = []
        for micro in range(batches):
            if self.stage == 0:
                piece = self._deal()
            else:
                yield lambda: self.links.has(0, ROWS) or self.links.gone(0)
                if not self.links.has(0, ROWS):
                    raise PeerLost("replica 0 is gone")
                piece = Piece(*self.links.take(0, ROWS))
                seed_all(stream_seed(session.job.seed, session.step, micro, self.stage))
            weighted.append(piece.weight * self._backward(piece, micro, micro == batches - 1))
            if session.technique.shard:
                self._end(replica.used(), alike=True)
            yield None
        with replica.counted():
            replica.finish()
        losses = self._end(weighted)
        self._run_step()
        self._report_peak(replica.counted_peak())
        return _mean(losses, batches)

    def _end(self, value: Any, *, alike: bool = False) -> dict[int, Any]:
        """This replica is through with its messages for now, as the others are; what each says.

        Raises:
            TrialError: they do not say the same, where they should.
        """
        ways = self._ways
        assert ways is not None
        ways.tell_end(self._others, value)
        said = {self.stage: value}
        for peer in self._others:
            said[peer] = ways.hear_end(peer)
            if alike and said[peer] != value:
                raise other_way(peer)
        return said

    def _backward(self, piece: Piece, micro: int, last: bool) -> float:
        found: list[float] = []

        def work() -> None:
            with self._replica.counted():
                found.append(self._replica.backward(piece, last=last))

        action = Action(Op.B, 0, micro)
        self._compute(action, work, self._seconds(action))
        return found[0]

    def _run_step(self) -> None:
        def work() -> None:
            with self._replica.counted():
                self._replica.step()

        action = Action(Op.STEP)
        self._compute(action, work, self._seconds(action))

    def _seconds(self, action: Action) -> float | None:
        """How long an action shall take where the device is emulated."""
        profile, shard = self.device.spec.profile, self.job.shards[0]
        if profile is None or action.op is not Op.STEP or not self.session.technique.shard:
            return emulated_seconds(action, shard, profile)
        return profile.memory_seconds(Bytes(step_bytes(shard) // self.session.members))


def _mean(losses: dict[int, list[float]], batches: int) -> float:
    """A step's loss, added up as the rule does: of each batch by replica, then the batches."""
    total = 0.0
    for micro in range(batches):
        loss = losses[0][micro]
        for rank in range(1, len(losses)):
            loss += losses[rank][micro]
        total += loss
    return total / batches
