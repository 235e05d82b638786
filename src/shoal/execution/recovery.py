"""What becomes of a trial whose worker died, that does not fit, or that raised."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shoal.core import event as events
from shoal.core.errors import (
    CapacityError,
    NarrowError,
    OrderError,
    StorageError,
    WorkerError,
    last_words,
)
from shoal.core.spec import DeviceSpec
from shoal.execution.failures import SameEnds, is_out_of_memory, signature
from shoal.execution.floor import Floor
from shoal.execution.hangs import end_if_hung
from shoal.execution.pausing import Pausing
from shoal.execution.ranks import Ranks
from shoal.execution.replanning import Replanning
from shoal.execution.rewind import damaged, fall_back, leave_array
from shoal.execution.trial import TrialRun
from shoal.execution.watchdog import Backoff, Watchdog, place_of
from shoal.fusion import Declined
from shoal.planning import MAX_DEATHS
from shoal.runtime.pool import Gone, Worker
from shoal.runtime.wire.messages import Refused
from shoal.scheduler import leases

MAX_ARRAY_DEATHS = 2
"""An array whose step was running when its worker died this often is broken up."""
MAX_STILLBORN = 5
"""When so many workers in a row died before they could work, the study stops."""
GONE_AFTER = 4
"""A device whose workers died before they could work, so many in a row, counts as gone until one
begins: a pipeline that lacks it goes on over fewer devices."""


class Recovery:
    """Brings trials and workers back.

    Args:
        give_up: Ends the run, with a reason and its error, where no worker can work.
    """

    def __init__(
        self,
        floor: Floor,
        pausing: Pausing,
        replanning: Replanning,
        *,
        retries: int,
        watchdog: Watchdog,
        backoff: Backoff,
        same_ends: SameEnds,
        give_up: Callable[[str, WorkerError], None],
    ) -> None:
        self._floor, self._pausing, self._replanning = floor, pausing, replanning
        self._retries, self._give_up = retries, give_up
        self._watchdog, self._backoff, self._same_ends = watchdog, backoff, same_ends
        self._rejoin: dict[str, tuple[float, DeviceSpec]] = {}
        self._stillborn = 0  # workers in a row that could not begin to work
        self._stillborn_at: Counter[str] = Counter()  # the same of each device
        self._on_probation: set[str] = set()  # devices whose next worker has yet to begin
        self._ranks = Ranks(floor, pausing, replanning)

    # -- trials ---------------------------------------------------------------------------

    def refused(self, reply: Refused) -> None:
        """A trial's own code raised, or it did not fit, or its generation is damaged."""
        state, cause = self._floor.states[reply.trial], reply.cause
        if isinstance(cause, StorageError) and state.restore:
            self._read_again(state, reply)
        elif isinstance(cause, CapacityError) and cause.is_anothers:
            self._set_back(state, "its array had no room for a batch of another trial")
            self._begin(state)
        elif state.job.array is not None and _leaves_array(reply):
            step = _last_step_there(state)
            self._set_back(state, "it cannot train in its array")
            leave_array(self._floor, state, step, last_words(reply.error))
            self._begin(state)
        elif is_out_of_memory(reply.error):
            growth = cause.growth if isinstance(cause, CapacityError) else 1.0
            self._set_back(state, "it ran out of memory")
            if state.job.array is not None or state.job.began is not None:
                leave_array(self._floor, state, state.step, "by itself it ran out of memory")
            if reply.trial in self._floor.open:
                self._replanning.make_smaller(state, reply.error, growth)
        elif isinstance(cause, NarrowError):
            self._set_back(state, "a weight that travelled as bfloat16 was read otherwise")
            if reply.trial in self._floor.open:
                self._replanning.make_whole(state, reply.error)
        elif isinstance(cause, OrderError) and self._replanning.chose_order:
            self._set_back(state, "the model drew random numbers that nothing drew before")
            if reply.trial in self._floor.open:
                self._replanning.make_plain(state, reply.error)
        elif state.may_try_again(signature(reply.error), self._retries):
            last = last_words(reply.error)
            self._set_back(state, f"retry {len(state.failures)} of {self._retries} after {last}")
            self._begin(state)
        else:
            self._floor.fail(reply.trial, reply.error)

    def _read_again(self, state: TrialRun, reply: Refused) -> None:
        """Its generation cannot be read: fall back, unless it is whole and not this trial's."""
        unread = state.restore
        self._set_back(state, f"its generation cannot be read: {reply.cause}")
        if state.restore == unread:
            self._floor.fail(reply.trial, reply.error)
            return
        damaged(self._floor, reply.trial, Path(unread), str(reply.cause))
        self._begin(state)

    def _set_back(self, state: TrialRun, reason: str) -> None:
        """Leave the device; the trial will go on from its newest generation, or anew.

        Whoever waited for its state takes that one, so that it may have ended then.
        """
        if state.others:
            self._floor.forget(state)  # its other stages wait for the one that failed
        self._floor.leave(state)
        fall_back(self._floor, state, reason)
        self._pausing.lost(state)

    def _begin(self, state: TrialRun) -> None:
        if state.job.trial in self._floor.open:
            self._floor.begin(state)

    # -- workers --------------------------------------------------------------------------

    def worker_gone(self, worker: Worker, end: Gone) -> None:
        """A worker died; its trials go on from their last saved state."""
        floor, device, reason = self._floor, worker.device, end.reason
        if device is None:
            return
        words = f"{reason}\n{worker.last_words}".strip()
        for state in floor.states.values():
            if device.name in state.others and (state.is_parked or not state.device):
                floor.forget_others(state)
                state.device = ""  # if it was leased on paper, the lease machine loses it too
        lost = [s for t, s in floor.states.items() if t in floor.open and device.name in s.homes]
        held = [state for state in lost if device.name in state.devices]
        floor.tell(
            events.WorkerDied(
                time=time.time(),
                device=device.name,
                pid=worker.pid,
                reason=words,
                trials=tuple(state.job.trial for state in held),
            )
        )
        self._count_stillborn(worker, words)
        self._count_same(worker, held, end)
        for state in held:
            if state.others:
                floor.forget(state)  # its other stages wait for one that is gone
        arrays = {state.job.trial: s.group for state in held if (s := state.job.array)}
        self._bring_back(held, worker, reason)
        self._break_up(held, arrays)
        for state in held:
            state.device = ""
        for state in lost:
            state.leave_home()
        self._replace_later(device)
        self._let_wait(device.name, lost, held, words)

    def _count_stillborn(self, worker: Worker, words: str) -> None:
        self._stillborn = 0 if worker.has_begun else self._stillborn + 1
        at = worker.name
        self._stillborn_at[at] = 0 if worker.has_begun else self._stillborn_at[at] + 1
        others = [w for w in self._floor.pool.workers.values() if w is not worker]
        if self._stillborn >= MAX_STILLBORN and not any(w.has_begun for w in others):
            reason = f"{self._stillborn} workers in a row ended before they could work"
            self._give_up(reason, WorkerError(f"{reason}. The last one: {words}"))

    def _count_same(self, worker: Worker, held: Sequence[TrialRun], end: Gone) -> None:
        error = end.error if worker.has_begun else ""  # else it could not load the recipe
        there = worker.running or {state.job.trial for state in held}
        if why := self._same_ends.ended(there, error, of=len(self._floor.states)):
            self._give_up("the same exception ended one worker after the other", WorkerError(why))

    def _bring_back(self, held: Sequence[TrialRun], worker: Worker, reason: str) -> None:
        """Blame whose code ran when it died, all that were granted when nobody's did.

        A worker that died while it waited, for a copy or for the other members of a gang, may
        have been ended from outside; or by a thread that a trial's code left behind, which would
        go on for ever if it were nobody's fault. Whoever gets further between is forgiven. A
        trial that stood at a step boundary, or that never began, lost nothing.
        """
        running = worker.running
        for state in held:
            if state.is_parked or not worker.has_begun:
                continue
            fall_back(self._floor, state, f"its worker died: {reason}")
            if not running or state.job.trial in running:
                got_further = state.saved_step > state.died_at >= 0
                state.deaths = 1 if got_further else state.deaths + 1
                state.died_at = state.saved_step

    def _break_up(self, held: Sequence[TrialRun], arrays: Mapping[int, str]) -> None:
        """Have the trials of an array train alone that ended its worker twice.

        All of them where it was a pass of theirs: nobody knows whose part, and alone it will be
        seen. Where it was one's own code, its data or its schedule, that one.
        """
        ends = {state.job.trial for state in held if state.deaths >= MAX_ARRAY_DEATHS}
        for state in held:
            trial, group = state.job.trial, arrays.get(state.job.trial)
            seated = {other for other, of in arrays.items() if of == group}
            if group is None or state.is_parked or state.deaths >= MAX_DEATHS:
                continue  # one that stood at a step boundary has what it had
            if min(seated) in ends:  # whom an array's pass counts as
                state.deaths = 0
                leave_array(self._floor, state, state.step, "its array ended its worker")
            elif trial in ends:
                why = "its own code ended its array's worker"
                leave_array(self._floor, state, state.step, why)

    def _replace_later(self, device: DeviceSpec) -> None:
        name, now = device.name, time.monotonic()
        self._watchdog.forget(name)
        self._floor.pool.drop(name)
        self._rejoin[name] = now + self._backoff.died(name, now), device

    def _let_wait(
        self, device: str, lost: Sequence[TrialRun], held: Sequence[TrialRun], words: str
    ) -> None:
        """Have its trials wait for a device again, but for those that ended meanwhile."""
        # With no step left a trial still has to evaluate and be saved: one more lease.
        left = {state.job.trial: state.steps_left or None for state in held}
        was_lent = device not in self._on_probation
        self._on_probation.discard(device)
        instructions = self._floor.lose_device(device, left) if was_lent else ()
        for state in held:
            if state.deaths >= MAX_DEATHS:
                self._floor.fail(
                    state.job.trial,
                    f"{WorkerError.__name__}: the worker died {state.deaths} times while it ran "
                    f"this trial, last: {words}",
                )
        for state in held:
            state.is_parked = False
        for state in lost:
            self._pausing.lost(state)
        self._floor.obey(instructions)

    def tick(self) -> None:
        """Replace dead workers when their time has come, and end those that hang."""
        now, floor = time.monotonic(), self._floor
        for name, (at, device) in list(self._rejoin.items()):
            if now >= at:
                del self._rejoin[name]
                floor.pool.replace(device)
                self._on_probation.add(name)
        self._let_join()
        leased: dict[str, bool] = {}
        for trial in floor.open:
            state = floor.states[trial]
            for name in () if state.is_parked else state.devices:
                leased[name] = leased.get(name, False) or state.is_new_there
        leased |= dict.fromkeys(self._on_probation, True)  # a start may hang as well
        for name, worker in list(floor.pool.workers.items()):
            self._watch(worker, name, now, leased)
        if self._ranks.close(self._gone()):
            self.planned()

    def _let_join(self) -> None:
        """Lend devices that were replaced; one that counts as gone when its worker has begun."""
        workers = self._floor.pool.workers
        for name in sorted(self._on_probation):
            if self._stillborn_at[name] < GONE_AFTER or workers[name].has_begun:
                self._on_probation.discard(name)
                self._floor.do(leases.DeviceJoined(name))

    def _gone(self) -> frozenset[str]:
        workers = self._floor.pool.workers
        begun = {name for name, worker in workers.items() if worker.has_begun}
        return frozenset(n for n, c in self._stillborn_at.items() if c >= GONE_AFTER) - begun

    def _watch(self, worker: Worker, name: str, now: float, leased: dict[str, bool]) -> None:
        order = self._replanning.asked(worker)
        end_if_hung(
            worker,
            self._watchdog,
            now,
            order=order,
            is_busy=order is not None or name in leased,
            is_patient=order is not None or leased.get(name, False),
        )
        works = worker.has_begun and name in leased  # one that starts would end of being asked
        if order is None and works and (still_s := self._watchdog.to_tell(name, now)):
            self._tell_stall(worker, still_s, is_patient=leased[name])

    def _tell_stall(self, worker: Worker, still_s: float, *, is_patient: bool) -> None:
        """Say that it gets nothing done, long before that counts as a hang."""
        there = [s for s in self._floor.states.values() if worker.name in s.devices]
        trials = {state.job.trial for state in there if not state.is_parked}
        running = worker.running & trials
        is_array = any(s.job.array is not None and s.job.trial in running for s in there)
        if is_array and running == {min(trials)}:
            running = set()  # an array's step counts as its first trial's
        self._floor.tell(
            events.WorkerStalled(
                time=time.time(),
                device=worker.name,
                trials=tuple(sorted(trials)),
                trial=min(running) if len(running) == 1 else None,
                seconds=still_s,
                limit_s=self._watchdog.limit_s(worker.name, patient=is_patient),
                place=place_of(worker.stacks()),
            )
        )

    def planned(self) -> None:
        """A plan is made: what its measures took was no hang."""
        now = time.monotonic()
        for name, worker in self._floor.pool.workers.items():
            self._watchdog.look(name, worker.work_done, now, leased=False)


def _leaves_array(reply: Refused) -> bool:
    """Whether what failed is the array, and the trial may do alone."""
    return isinstance(reply.cause, Declined) or is_out_of_memory(reply.error)


def _last_step_there(state: TrialRun) -> int:
    """Up to which step its array could train a trial that it cannot train any further.

    Where it was known, it could not be evaluated after it.
    """
    return state.step - state.leaves_now
