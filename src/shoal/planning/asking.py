"""Who is asked what, whose answer it is, and whom a worker's death is blamed on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.core.errors import (
    ShoalError,
    SpecError,
    TooLarge,
    TrialError,
    WorkerError,
    last_words,
)
from shoal.core.spec import TrialSpec
from shoal.core.units import Bytes, list_some
from shoal.planner.growth import grown, grown_shard
from shoal.planning.pipelining import Question
from shoal.planning.planned import Settled
from shoal.runtime.pool import Gone, Worker, WorkerPool
from shoal.runtime.wire.messages import (
    Describe,
    Described,
    MeasureArray,
    Measured,
    MeasuredArray,
    MeasuredArrayShards,
    Order,
    Refused,
    TimeArray,
    TimedArray,
)

MAX_DEATHS = 3
"""A trial that ends its worker so often while it is measured, or while it trains and gets no
further between, has failed. A worker that was ended because it hung counts as one that died."""

EACH = 8
"""Trials that a worker is asked to describe at a time, while others describe others."""

Receive = Callable[[], tuple[Worker | None, object] | None]
"""The next message of a worker, or None when there was none for a moment. Whoever gives it
has looked after the worker: one that is gone is replaced, now or later."""

_ANSWERS = (Described, Measured, MeasuredArray, MeasuredArrayShards, TimedArray, Refused, Gone)


class Abandoned(WorkerError):
    """Nobody needs the plan any more: the run ends."""


@dataclass(slots=True)
class _Talk:
    """One signature: its trials that may speak for it, and how far it is with the first.

    ``refused``: in which words trials of it were refused that cannot be asked for so.
    """

    signature: str
    trials: list[TrialSpec]
    question: Question | None = None
    refused: set[str] = field(default_factory=set)


class Asking:
    """The orders and answers of one plan.

    Args:
        receive: Where messages come from.
        growth: Batches take so many times what the first one takes.

    Attributes:
        asked: The workers that have an order to answer, and which.
        failures: Why trials cannot be planned: tracebacks, by number.
    """

    def __init__(self, pool: WorkerPool, receive: Receive, growth: float) -> None:
        self._pool, self._next, self._growth = pool, receive, growth
        self.asked: dict[Worker, Order] = {}
        self.failures: dict[int, str] = {}
        self._refusal: SpecError | None = None  # the first
        self._deaths: dict[int, int] = {}

    def describe(
        self, trials: Sequence[TrialSpec], *, arrays: bool = False, shapes: bool = False
    ) -> Described:
        """The signatures of the trials that can be built; equal ones cost the same.

        All workers build some, as they are free to. ``arrays``: also which could share an array;
        ``shapes``: what each makes.

        Raises:
            SpecError, TrialError, WorkerError: none can be built.
        """
        waiting = [tuple(trials[i : i + EACH]) for i in range(0, len(trials), EACH)]
        running: dict[Worker, tuple[TrialSpec, ...]] = {}
        found: list[Described] = []
        while waiting or running:
            for worker in [w for w in self._pool.workers.values() if w not in running]:
                if waiting:
                    running[worker] = waiting.pop(0)
                    self._ask(worker, Describe(running[worker], arrays, shapes))
            answer = self._receive()
            if answer is None or answer[0] not in running:
                continue
            worker, reply = answer
            some = running.pop(worker)
            if isinstance(reply, Described):
                found.append(reply)
                continue
            assert isinstance(reply, Gone)
            self._blame(worker, reply, some)
            if able := tuple(t for t in some if t.number not in self.failures):
                waiting.insert(0, able)
        reply = _together(found)
        if not reply.signatures and reply.cause:
            raise reply.cause
        self.failures |= reply.errors
        if not reply.signatures:
            raise self._none_can_run(trials)
        return reply

    def refuse(
        self,
        described: Described,
        refused: Mapping[int, str],
        kind: type[SpecError | TooLarge] = SpecError,
    ) -> Described:
        """Without the trials that are refused for what was described of them; they have failed.

        Raises:
            SpecError, TooLarge: no other is left; of that ``kind``.
        """
        if not refused:
            return described
        if described.signatures.keys() <= refused.keys():
            raise kind(refused[min(refused)])
        self.failures |= {n: f"{kind.__name__}: {words}" for n, words in refused.items()}
        return Described(
            signatures={n: s for n, s in described.signatures.items() if n not in refused},
            errors=described.errors,
            cause=described.cause,
            arrays={n: s for n, s in described.arrays.items() if n not in refused},
            constants={n: s for n, s in described.constants.items() if n not in refused},
            noticed={n: w for n, w in described.noticed.items() if n not in refused},
            batches={n: k for n, k in described.batches.items() if n not in refused},
            left=described.left,
        )

    def measure_arrays(
        self, order: MeasureArray | TimeArray, count: int, only: Iterable[Worker] = ()
    ) -> dict[Worker, object]:
        """What so many workers answer to an order that they are given at once, by worker.

        ``only``: those, if they are there still.
        """
        while not self._pool.workers:
            self._receive()
        there = list(self._pool.workers.values())
        asked = [w for w in there if w in set(only)] if only else there[:count]
        for worker in asked:
            self._ask(worker, order)
        found: dict[Worker, object] = {}
        while len(found) < len(asked):
            answer = self._receive()
            if answer and answer[0] in asked:
                found[answer[0]] = answer[1]
        return found

    def answer(self, order: Order) -> object:
        """What one worker answers to an order; in words, why it has no answer."""
        _, reply = self._ask_one(order)
        if isinstance(reply, Measured):
            return self._grown(reply)
        if isinstance(reply, MeasuredArrayShards) and self._growth != 1.0:
            shards = tuple(grown_shard(shard, self._growth) for shard in reply.shards)
            size = Bytes(math.ceil(reply.batch_bytes * self._growth))
            return replace(reply, shards=shards, batch_bytes=size)
        if isinstance(reply, Refused):
            return last_words(reply.error)
        return f"a worker ended meanwhile: {reply.reason}" if isinstance(reply, Gone) else reply

    def settle(
        self, alike: Mapping[str, Sequence[TrialSpec]], question: Callable[[TrialSpec], Question]
    ) -> dict[str, Settled]:
        """Measure one trial of each signature, as many at a time as there are workers.

        A trial whose own code raises, or that cannot be asked for so, goes to ``failures``, and
        the next of its shape speaks for the others; unless two were refused in the same words.
        Where one is too large the others are asked for all the same, so that all can be named.

        Raises:
            TooLarge: some fit in no way; names them, and what the first one needs.
            PlanError: a question or an answer refuses the study.
            SpecError, TrialError, WorkerError: none can be measured.
        """
        waiting = [_Talk(signature, list(trials)) for signature, trials in alike.items()]
        running: dict[Worker, _Talk] = {}
        settled: dict[str, Settled] = {}
        too_large: list[tuple[_Talk, TooLarge]] = []
        try:
            while waiting or running:
                for worker in [w for w in self._pool.workers.values() if w not in running]:
                    if waiting:
                        talk = running[worker] = waiting.pop(0)
                        talk.question = question(talk.trials[0])
                        self._ask(worker, next(talk.question))
                answer = self._receive()
                if answer is None or answer[0] not in running:
                    continue
                worker, talk = answer[0], running.pop(answer[0])
                try:
                    found = self._hear(answer, talk)
                except TooLarge as error:
                    too_large.append((talk, error))
                    continue
                if isinstance(found, Settled):
                    settled[talk.signature] = found
                elif found is not None:
                    running[worker] = talk
                    self._ask(worker, found)
                elif talk.trials:
                    waiting.insert(0, talk)
        except ShoalError as error:
            if not isinstance(error, Abandoned):
                self._drain(set(running))
            raise
        if too_large:
            raise _all_too_large(too_large, sum(map(len, alike.values())))
        if alike and not settled:
            raise self._refusal or self._none_can_run(
                [t for trials in alike.values() for t in trials]
            )
        return {signature: settled[signature] for signature in alike if signature in settled}

    def _hear(self, answer: tuple[Worker, object], talk: _Talk) -> Order | Settled | None:
        """The next order, or what is settled; None when another worker or trial must be asked."""
        worker, reply = answer
        if isinstance(reply, Measured):
            assert talk.question is not None
            try:
                return talk.question.send(self._grown(reply))
            except StopIteration as end:
                settled: Settled = end.value
                return settled
        if isinstance(reply, Refused):
            self._note_failure(reply, talk)
        else:
            assert isinstance(reply, Gone)
            self._blame(worker, reply, talk.trials[:1])
        talk.trials = [trial for trial in talk.trials if trial.number not in self.failures]
        return None

    # -- one order ------------------------------------------------------------------------

    def _ask_one(self, order: Order) -> tuple[Worker, object]:
        """Ask whichever worker is there, and wait for its answer or its end."""
        while not self._pool.workers:
            self._receive()
        worker = next(iter(self._pool.workers.values()))
        self._ask(worker, order)
        while True:
            answer = self._receive()
            if answer and answer[0] is worker:
                return answer

    def _ask(self, worker: Worker, order: Order) -> None:
        self.asked[worker] = order
        worker.send(order)

    def _receive(self) -> tuple[Worker, object] | None:
        """An answer to an order, or the end of a worker that was asked; None: nothing of that."""
        worker, reply = self._next() or (None, None)
        if worker is None or worker not in self.asked or not isinstance(reply, _ANSWERS):
            return None
        del self.asked[worker]
        return worker, reply

    def _drain(self, running: set[Worker]) -> None:
        """Have no answer under way that somebody could take for another one."""
        while running & self.asked.keys():
            self._receive()

    # -- what it says ---------------------------------------------------------------------

    def _grown(self, reply: Measured) -> Measured:
        return replace(reply, measure=grown(reply.measure, self._growth))

    def _note_failure(self, reply: Refused, talk: _Talk) -> None:
        """A trial that cannot be measured fails alone; a wrong request stops the study."""
        cause = reply.cause
        if isinstance(cause, ShoalError) and not isinstance(cause, SpecError | TrialError):
            raise cause
        self.failures[reply.trial] = reply.error
        if not isinstance(cause, SpecError):
            return
        self._refusal = self._refusal or cause
        if str(cause) in talk.refused:
            self.failures |= dict.fromkeys((t.number for t in talk.trials), reply.error)
        talk.refused.add(str(cause))

    def _blame(self, worker: Worker, end: Gone, asked: Sequence[TrialSpec]) -> None:
        """A trial whose code ended its worker too often while it was measured fails alone."""
        for trial in asked:
            if trial.number in worker.running:
                deaths = self._deaths[trial.number] = self._deaths.get(trial.number, 0) + 1
                if deaths >= MAX_DEATHS:
                    self.failures[trial.number] = (
                        f"{WorkerError.__name__}: the worker died {deaths} times while it "
                        f"measured this trial, last: {end.reason}\n{worker.last_words}".strip()
                    )

    def _none_can_run(self, trials: Sequence[TrialSpec]) -> TrialError | WorkerError:
        """Whose code raised, or ended its workers."""
        first = trials[0].number
        kind = WorkerError if first in self._deaths else TrialError
        found = self.failures[first].rstrip()
        if len(trials) == 1:
            return kind(f"the trial cannot run:\n{found}")
        return kind(f"none of {len(trials)} trials can run; trial {first} says:\n{found}")


def _all_too_large(found: Sequence[tuple[_Talk, TooLarge]], of: int) -> TooLarge:
    """What the first of them says, and which others there are."""
    _, first = min(found, key=lambda one: one[0].trials[0].number)
    numbers = sorted(trial.number for talk, _ in found for trial in talk.trials)
    if len(numbers) == 1:
        return first
    which = f"{len(numbers)} of {of} trials do not fit"
    return TooLarge(f"{first} {which}: {list_some(numbers)}.")


def _together(found: Sequence[Described]) -> Described:
    """Answers about several trials each as one; the cause is that of the first trial.

    In the order of trials, whichever worker was the first to answer.
    """
    found = sorted(found, key=lambda one: min((*one.signatures, *one.errors), default=math.inf))
    told = sorted(found, key=lambda one: min(one.errors, default=math.inf))
    return Described(
        signatures={n: s for one in found for n, s in one.signatures.items()},
        errors={n: e for one in found for n, e in one.errors.items()},
        cause=next((one.cause for one in told if one.cause), None),
        arrays={n: s for one in found for n, s in one.arrays.items()},
        constants={n: c for one in found for n, c in one.constants.items()},
        noticed={n: w for one in found for n, w in one.noticed.items()},
        batches={n: k for one in found for n, k in one.batches.items()},
        left=tuple(dict.fromkeys(words for one in found for words in one.left)),
    )
