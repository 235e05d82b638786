"""The first plan of a study, before anything runs: workers are watched, replaced, reported on.

``Replanning`` is its pair: plans that are made while trials run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from shoal.core import event as events
from shoal.core.errors import SpecError, WorkerError
from shoal.core.spec import TrialSpec
from shoal.execution.failures import SameEnds
from shoal.execution.floor import Sink
from shoal.execution.hangs import end_if_hung
from shoal.execution.watchdog import Watchdog
from shoal.planning import Planned, Planner
from shoal.runtime.pool import Gone, Worker, WorkerPool
from shoal.runtime.wire.messages import Broken, Describe, Happened, Order

_WAIT_S = 0.5
_LONG_S = 3.0  # then it is worth a word that planning takes its time
_SILENT_S = 5.0  # then it is worth looking whether anybody is left to say something


@dataclass(slots=True)
class _Wait:
    """An order that is being answered; seconds of the clock."""

    order: Order
    told: float  # when somebody was last told of it; at first when it was given
    trial: int | None  # that is being built or measured
    since: float


class FirstPlan:
    """Looks after the workers while a planner asks them.

    Args:
        pool: Configured for the study.
        watchdog: Says which worker hangs.
        slow_s: How often the sink hears of an order that nobody has answered yet.
        sink: Called with what happens.
        clock: Seconds; never jumps.
    """

    def __init__(
        self,
        planner: Planner,
        pool: WorkerPool,
        watchdog: Watchdog,
        *,
        slow_s: float,
        sink: Sink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._planner, self._pool, self._watchdog = planner, pool, watchdog
        self._slow_s, self._sink, self._clock = slow_s, sink, clock
        self._waits: dict[Worker, _Wait] = {}
        self._heard = self._began = clock()  # when a message last came, when planning began
        self._is_told = False  # that it takes its time
        self._same_ends, self._count = SameEnds(), 0
        self._failed: WorkerError | None = None  # why nobody is asked any more

    def make(self, trials: Sequence[TrialSpec]) -> Planned:
        """Plan.

        Raises:
            PlanError: a trial fits in no way, or what was forced cannot be done.
            SpecError, TrialError, WorkerError: no trial can be built, or no worker can work.
        """
        self._count = len(trials)
        return self._planner.plan(trials, receive=self._receive)

    def _receive(self) -> tuple[Worker, object] | None:
        """The next message of a worker; None when there was none for a moment."""
        if self._failed is not None:
            raise self._failed  # whoever waits for others waits in vain
        now = self._clock()
        self._watch(now)
        self._tell_slow(now)
        received = self._pool.receive(timeout=_WAIT_S)
        worker, reply = received or (None, None)
        if worker is None:
            if now - self._heard > _SILENT_S:
                self._pool.check_alive()
            return None
        self._heard = now
        if isinstance(reply, Broken):
            worker.last_words = reply.error  # its end arrives next
            if isinstance(reply.cause, SpecError):  # of every worker's recipe
                raise reply.cause
        elif isinstance(reply, Happened):
            self._sink(reply.events)
        elif isinstance(reply, Gone):
            self._replace(worker, reply)
        return worker, reply

    def _watch(self, now: float) -> None:
        for worker in list(self._pool.workers.values()):
            order = self._planner.asked.get(worker)
            end_if_hung(worker, self._watchdog, now, order=order, is_busy=order is not None)

    def _tell_slow(self, now: float) -> None:
        """Say what an order that is not answered yet is about, now and then."""
        if now - self._began >= _LONG_S and not self._is_told:
            self._is_told = True
            self._sink([events.PlanningGoesOn(time=time.time(), seconds=now - self._began)])
        asked, before = self._planner.asked, self._waits
        self._waits = {
            worker: wait
            if (wait := before.get(worker)) is not None and wait.order is order
            else _Wait(order, told=now, trial=None, since=now)
            for worker, order in asked.items()
        }
        for worker, wait in self._waits.items():
            trial = min(worker.running, default=None)
            if trial != wait.trial:
                wait.trial, wait.since = trial, now
            if now - wait.told >= self._slow_s:
                wait.told = now
                self._sink([self._waited(worker, wait, now)])

    def _waited(self, worker: Worker, wait: _Wait, now: float) -> events.PlanningWaited:
        work = "build" if isinstance(wait.order, Describe) else "measure"
        return events.PlanningWaited(
            time=time.time(),
            device=worker.name,
            trial=wait.trial,
            work=work if wait.trial is not None else "start",
            seconds=now - wait.since,
            limit_s=self._watchdog.limit_s(worker.name, patient=True),
        )

    def _replace(self, worker: Worker, end: Gone) -> None:
        """Before a study runs, only a trial's own code may end a worker.

        Raises:
            WorkerError: none was running, or one exception ends one worker after the other.
        """
        device = worker.device
        if device is None or not worker.running:
            words = worker.last_words or f"{end.reason}. Its messages are above."
            self._give_up(
                f"the worker of {worker.name} cannot work, it died while the study was being "
                f"planned: {words}"
            )
        died = events.WorkerDied(
            time=time.time(),
            device=device.name,
            pid=worker.pid,
            reason=f"{end.reason} {_during(worker.running)}\n{worker.last_words}".strip(),
            trials=(),
        )
        self._sink([died])
        if why := self._same_ends.ended(worker.running, end.error, of=self._count):
            self._give_up(why)
        self._watchdog.forget(device.name)
        self._pool.replace(device)

    def _give_up(self, why: str) -> NoReturn:
        self._failed = WorkerError(why)
        raise self._failed


def _during(trials: set[int]) -> str:
    return f"while it measured trial {', '.join(map(str, sorted(trials)))}"
