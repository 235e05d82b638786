"""Emulated devices: real threads and real scheduling, kernels and copies that sleep.

[Note: what is real here]
    real       Leases and Interleaver, the generated programs, what each action waits for
               (needs.py, slots.py), three threads a device (compute, up, down), one thread for
               the study, queues between them, and all the time Python takes
    sleeping   F, B, LOAD, STORE: time.sleep for the profile's seconds times ``scale``
    absent     models, bytes, numbers; STEP (inside B) and transfers between stages take no time

A device follows the rules of [Note: programs]: actions are issued in list order, copies
then wait in their own stream, and a compute action is issued when it is chosen.

[Note: late sleepers]
A thread that sleeps wakes up late, here by a tenth of a millisecond to a few when other
programs use the cores. A device with kernels queued would not notice. So every action has
a due time: it starts when its stream is free, what it needs is done and it was issued,
by their due times and not by when a thread saw them, and the thread sleeps until start +
seconds. Delays do not add up, unless Python is too slow to keep the streams filled: then
due times lie in the past, nobody sleeps, and the run takes longer. What is measured is real
time, from the first order to the last event.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from emulate import EmulatedTrial

from shoal.core.seams import Candidate
from shoal.program.costs import JobCosts, action_seconds
from shoal.program.ir import Action, Op, Program
from shoal.program.needs import computes, find_needs, matching_sends
from shoal.program.slots import assign_slots
from shoal.scheduler import leases
from shoal.scheduler.interleave import Interleaver
from shoal.scheduler.policy import LongestRemainingFirst

_COPIES = {Op.LOAD: "up", Op.STORE: "down"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """A trial's step, compiled: actions, what each waits for, how long each sleeps."""

    actions: tuple[Action, ...]
    now: tuple[tuple[int, ...], ...]
    before: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]

    @property
    def compute_s(self) -> float:
        times = zip(self.actions, self.seconds, strict=True)
        return sum(seconds for action, seconds in times if computes(action))


def compile_step(program: Program, costs: JobCosts, scale: float) -> Kernels:
    """The one device's list of a spilled step, with scaled times."""
    (actions,) = program.devices
    needs = find_needs(actions, assign_slots(actions))
    return Kernels(
        actions=actions,
        now=tuple(need.now for need in needs),
        before=tuple(need.before for need in needs),
        seconds=tuple(action_seconds(action, costs) * scale for action in actions),
    )


@dataclass(slots=True, eq=False)
class _Lane:
    """A leased trial on its device: how far its steps are issued and done.

    Times are due times on the clock of ``time.perf_counter``.
    """

    trial: int
    kernels: Kernels
    steps_left: int  # of the trial
    until: int  # steps that may begin
    issued_at: float  # when the list was last free to go on
    step: int = 0  # counted from this lease's begin
    head: int = 0
    is_step_open: bool = False  # has the step's first unit begun?
    done: dict[tuple[int, int], float] = field(default_factory=dict)  # (step, index) -> due
    copies: dict[str, deque[tuple[int, int, float]]] = field(
        default_factory=lambda: {"up": deque(), "down": deque()}
    )
    in_flight: int = 0
    step_s: float = 0.0  # device seconds of this step so far
    last_end: float = 0.0

    def needs(self, step: int, index: int) -> list[tuple[int, int]]:
        before = [(step - 1, need) for need in self.kernels.before[index]] if step else []
        return [*before, *((step, need) for need in self.kernels.now[index])]

    def is_ready(self, step: int, index: int) -> bool:
        return all(need in self.done for need in self.needs(step, index))

    def ready_at(self, step: int, index: int) -> float:
        return max((self.done[need] for need in self.needs(step, index)), default=0.0)

    def issue(self) -> None:
        """Issue up to the next compute action; begin the next step when this one is issued."""
        actions = self.kernels.actions
        while self.step < self.until:
            if self.head == len(actions):
                self._begin_next_step()
                continue
            action = actions[self.head]
            if computes(action):
                return
            if action.op in _COPIES:
                self.copies[_COPIES[action.op]].append((self.step, self.head, self.issued_at))
            else:
                self.done[self.step, self.head] = self.issued_at
            self.head += 1

    def _begin_next_step(self) -> None:
        self.done = {which: due for which, due in self.done.items() if which[0] == self.step}
        self.step += 1
        self.head = 0

    def can_compute(self) -> bool:
        return self.step < self.until and self.is_ready(self.step, self.head)

    def can_copy(self, stream: str) -> bool:
        waiting = self.copies[stream]
        return bool(waiting) and self.is_ready(*waiting[0][:2])

    def is_drained(self) -> bool:
        return self.step >= self.until and not (self.in_flight or any(self.copies.values()))

    def ends_step(self, index: int) -> bool:
        return not any(computes(action) for action in self.kernels.actions[index + 1 :])


class EmulatedDevice:
    """Three threads that sleep. ``busy_s`` are the profile's seconds that it computed."""

    def __init__(self, name: str, study: queue.SimpleQueue[leases.Event]) -> None:
        self.name, self.busy_s = name, 0.0
        self._study = study
        self._lanes: dict[int, _Lane] = {}
        self._interleaver = Interleaver()
        self._changed = threading.Condition()
        self._is_over = False
        targets = (self._compute, lambda: self._copy("up"), lambda: self._copy("down"))
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def grant(self, trial: int, kernels: Kernels, *, steps: int, steps_left: int) -> None:
        with self._changed:
            now = time.perf_counter()
            lane = _Lane(trial, kernels, steps_left, until=steps, issued_at=now, last_end=now)
            self._lanes[trial] = lane
            lane.issue()
            self._changed.notify_all()

    def extend(self, trial: int, steps: int) -> None:
        """Ignored for a trial that has left: its LeaseEnded crossed this order."""
        with self._changed:
            lane = self._lanes.get(trial)
            if lane is None:
                return
            if lane.step >= lane.until:
                lane.issued_at = time.perf_counter()
            lane.until += steps
            lane.issue()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _wait_for(self, can_go: Callable[[_Lane], bool]) -> list[_Lane]:
        """The lanes that can go on; empty when the study is over. The lock is held."""
        while not (ready := [lane for lane in self._lanes.values() if can_go(lane)]):
            if self._is_over:
                return []
            self._changed.wait()
        return ready

    def _compute(self) -> None:
        free_at = 0.0
        while True:
            with self._changed:
                ready = self._wait_for(_Lane.can_compute)
                if not ready:
                    return
                lane = self._choose(ready)
                step, index = lane.step, lane.head
                start = max(free_at, lane.ready_at(step, index), lane.issued_at)
                free_at = start + lane.kernels.seconds[index]
                lane.head += 1
                lane.in_flight += 1
                lane.issued_at = start
                lane.issue()
            sleep_until(free_at)
            with self._changed:
                self._account(lane, index, start, free_at)
                self._finish(lane, step, index, free_at)

    def _choose(self, ready: Sequence[_Lane]) -> _Lane:
        trial = self._interleaver.choose(
            [
                Candidate(
                    lane.trial,
                    self._interleaver.ticket(lane.trial),
                    lane.steps_left * lane.kernels.compute_s,
                    warm=True,
                    step_s=lane.kernels.compute_s,
                )
                for lane in ready
            ]
        )
        lane = self._lanes[trial]
        if not lane.is_step_open:
            lane.is_step_open = True
            self._interleaver.started(trial, lane.step)
        return lane

    def _account(self, lane: _Lane, index: int, start: float, end: float) -> None:
        """A step's device seconds: its units, and the time before each that nobody else used."""
        self.busy_s += end - start
        lane.step_s += end - lane.last_end
        for leased in self._lanes.values():
            leased.last_end = max(leased.last_end, end)
        if not lane.ends_step(index):
            return
        lane.steps_left -= 1
        lane.is_step_open = False
        self._interleaver.step_finished(lane.trial)
        self._study.put(leases.StepFinished(lane.trial, self.name, max(lane.step_s, 0.0)))
        lane.step_s = 0.0

    def _copy(self, stream: str) -> None:
        free_at = 0.0
        while True:
            with self._changed:
                ready = self._wait_for(lambda lane: lane.can_copy(stream))
                if not ready:
                    return
                lane = min(ready, key=lambda lane: self._interleaver.ticket(lane.trial))
                step, index, issued_at = lane.copies[stream].popleft()
                start = max(free_at, lane.ready_at(step, index), issued_at)
                free_at = start + lane.kernels.seconds[index]
                lane.in_flight += 1
            sleep_until(free_at)
            with self._changed:
                self._finish(lane, step, index, free_at)

    def _finish(self, lane: _Lane, step: int, index: int, due: float) -> None:
        lane.in_flight -= 1
        lane.done[step, index] = due
        if lane.is_drained():
            del self._lanes[lane.trial]
            self._study.put(
                leases.LeaseEnded(lane.trial, self.name, lane.steps_left)
                if lane.steps_left
                else leases.TrialEnded(lane.trial)
            )
        self._changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One study: real seconds, and the share of them in which the devices computed."""

    seconds: float
    busy: float
    leases: int
    moves: int


def run_study(
    trials: Sequence[EmulatedTrial],
    kernels: Mapping[int, Kernels],
    *,
    devices: int,
    active: int,
    lease_s: float,
) -> Result:
    """Train all trials; ``kernels`` is by batch size. Blocks until the last trial ends."""
    events: queue.SimpleQueue[leases.Event] = queue.SimpleQueue()
    machine = leases.Leases(LongestRemainingFirst(), active=active, lease_s=lease_s)
    workers = {f"d{i}": EmulatedDevice(f"d{i}", events) for i in range(devices)}
    study = _Study(machine, workers, {t.number: kernels[t.batch] for t in trials})
    began = time.perf_counter()
    for name in workers:
        study.handle(leases.DeviceJoined(name))
    for trial in trials:
        step_s = kernels[trial.batch].compute_s
        study.handle(leases.TrialAdded(trial.number, trial.steps, step_s))
    while study.steps_left:
        study.handle(events.get())
    seconds = time.perf_counter() - began
    for worker in workers.values():
        worker.close()
    busy = sum(worker.busy_s for worker in workers.values()) / (devices * seconds)
    return Result(seconds=seconds, busy=busy, leases=study.grants, moves=study.moves)


class _Study:
    """The study's thread: events to the machine, its instructions to the devices."""

    def __init__(
        self,
        machine: leases.Leases,
        workers: Mapping[str, EmulatedDevice],
        kernels: Mapping[int, Kernels],
    ) -> None:
        self._machine, self._workers, self._kernels = machine, workers, kernels
        self._home: dict[int, str] = {}
        self.steps_left: dict[int, int] = {}
        self.grants = self.moves = 0

    def handle(self, event: leases.Event) -> None:
        match event:
            case leases.TrialAdded():
                self.steps_left[event.trial] = event.steps_left or 0
            case leases.StepFinished():
                self.steps_left[event.trial] -= 1
            case leases.TrialEnded():
                del self.steps_left[event.trial]
        for order in self._machine.handle(event):
            self._obey(order)

    def _obey(self, order: leases.Instruction) -> None:
        worker = self._workers[order.device]
        if isinstance(order, leases.ExtendLease):
            worker.extend(order.trial, order.steps)
            return
        self.grants += 1
        self.moves += self._home.get(order.trial, order.device) != order.device
        self._home[order.trial] = order.device
        worker.grant(
            order.trial,
            self._kernels[order.trial],
            steps=order.steps,
            steps_left=self.steps_left[order.trial],
        )


def run_pipeline(program: Program, costs: JobCosts, *, steps: int, scale: float) -> float:
    """Real seconds of ``steps`` steps of a pipeline, one thread a device.

    Stages are resident and every device runs its list in order, so one stream is enough.
    A message carries when it is due.
    """
    inboxes = {to: queue.SimpleQueue[float]() for to in matching_sends(program)}
    outboxes = {source: inboxes[to] for to, source in matching_sends(program).items()}
    began = time.perf_counter()

    def stage(device: int) -> None:
        due = began
        for _ in range(steps):
            for index, action in enumerate(program.devices[device]):
                if action.op is Op.RECV:
                    due = max(due, inboxes[device, index].get())
                elif action.op is Op.SEND:
                    outboxes[device, index].put(due)
                else:
                    due += action_seconds(action, costs) * scale
                    sleep_until(due)

    threads = [threading.Thread(target=stage, args=(d,)) for d in range(len(program.devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def sleep_until(due: float) -> None:
    left = due - time.perf_counter()
    if left > 0:
        time.sleep(left)
