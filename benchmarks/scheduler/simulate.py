"""A study on paper: the lease machine drives devices that only count time, step by step.

A device runs one step at a time; its interleaver chooses among the trials it has. A
trial that comes from another device, or comes back after others had its place, is ready
``switch_s`` later; meanwhile the device runs what else it has, if anything. The first
device of a trial costs nothing, because every schedule pays that. Messages take no time.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.core.seams import LeasePolicy
from shoal.scheduler.interleave import Candidate, Interleaver
from shoal.scheduler.leases import (
    DeviceJoined,
    Event,
    GrantLease,
    LeaseEnded,
    Leases,
    StepFinished,
    TrialAdded,
    TrialEnded,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimTrial:
    """What will really happen to a trial, and what the scheduler is told of it."""

    steps_s: Sequence[float]  # drawn seconds of each step
    predicted_s: float  # of a step, as told
    switch_s: float

    @property
    def work_s(self) -> float:
        return sum(self.steps_s)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a simulated study took."""

    makespan_s: float = 0.0
    moves: int = 0
    handle_s: list[float] = field(default_factory=list)  # real seconds of each Leases.handle
    choose_s: list[float] = field(default_factory=list)  # and of each Interleaver.choose


@dataclass(slots=True)
class _Device:
    interleaver: Interleaver
    left: dict[int, int] = field(default_factory=dict)  # trial -> steps of its lease
    ready: dict[int, float] = field(default_factory=dict)  # trial -> when its state is here
    recent: list[int] = field(default_factory=list)  # whose state is still here
    is_busy: bool = False


def lower_bound(trials: Sequence[SimTrial], devices: int) -> float:
    """No schedule ends sooner: all the work on all devices, or the longest trial alone."""
    work_s = [trial.work_s for trial in trials]
    return max(sum(work_s) / devices, max(work_s))


class Simulation:
    """One study; ``run`` gives its outcome."""

    def __init__(
        self,
        trials: Sequence[SimTrial],
        devices: int,
        policy: LeasePolicy,
        *,
        active: int = 1,
        lease_s: float = 2.0,
    ) -> None:
        self._trials, self._active = trials, active
        self._leases = Leases(policy, active=active, lease_s=lease_s)
        self._devices = {f"d{i}": _Device(Interleaver()) for i in range(devices)}
        self._queue: list[tuple[float, int, str, int | None]] = []  # when, order, device, trial
        self._now, self._order = 0.0, 0
        self._done = [0] * len(trials)
        self._spent_s = [0.0] * len(trials)
        self._home: dict[int, str] = {}
        self.outcome = Outcome()

    def run(self) -> Outcome:
        for name in self._devices:
            self._send(DeviceJoined(name))
        for number, trial in enumerate(self._trials):
            steps = len(trial.steps_s)
            self._send(TrialAdded(number, steps, trial.predicted_s, trial.switch_s))
        while self._queue:
            self._now, _, device, number = heapq.heappop(self._queue)
            if number is not None:
                self._finish_step(device, number)
            self._start_step(device)
        assert all(n == len(t.steps_s) for n, t in zip(self._done, self._trials, strict=True))
        self.outcome.makespan_s = self._now
        return self.outcome

    def _send(self, event: Event) -> None:
        began = time.perf_counter()
        orders = self._leases.handle(event)
        self.outcome.handle_s.append(time.perf_counter() - began)
        for order in orders:
            device = self._devices[order.device]
            if isinstance(order, GrantLease):
                self._admit(order.device, order.trial)
                device.left[order.trial] = order.steps
                self._start_step(order.device)
            else:
                device.left[order.trial] += order.steps

    def _admit(self, name: str, number: int) -> None:
        device = self._devices[name]
        home = self._home.get(number)
        moves = home is not None and (home != name or number not in device.recent)
        device.ready[number] = self._now + (self._trials[number].switch_s if moves else 0.0)
        device.recent = [*(n for n in device.recent if n != number), number][-self._active :]
        self._home[number] = name
        self.outcome.moves += moves

    def _start_step(self, name: str) -> None:
        device = self._devices[name]
        runnable = [n for n, steps in device.left.items() if steps > 0]
        if device.is_busy or not runnable:
            return
        ready = [n for n in runnable if device.ready[n] <= self._now]
        if not ready:
            self._push(min(device.ready[n] for n in runnable), name, None)
            return
        number = self._choose(device, ready)
        device.is_busy = True
        device.interleaver.started(number, self._done[number])
        self._push(self._now + self._trials[number].steps_s[self._done[number]], name, number)

    def _choose(self, device: _Device, ready: list[int]) -> int:
        candidates = [
            Candidate(n, device.interleaver.ticket(n), self._remaining_s(n), True, self._step_s(n))
            for n in ready
        ]
        began = time.perf_counter()
        number = device.interleaver.choose(candidates)
        self.outcome.choose_s.append(time.perf_counter() - began)
        return number

    def _remaining_s(self, number: int) -> float:
        left = len(self._trials[number].steps_s) - self._done[number]
        return left * self._step_s(number)

    def _step_s(self, number: int) -> float:
        """As a worker knows it: the mean of the steps it has seen."""
        done = self._done[number]
        return self._spent_s[number] / done if done else self._trials[number].predicted_s

    def _finish_step(self, name: str, number: int) -> None:
        device, trial = self._devices[name], self._trials[number]
        device.is_busy = False
        device.interleaver.step_finished(number)
        seconds = trial.steps_s[self._done[number]]
        self._spent_s[number] += seconds
        self._done[number] += 1
        device.left[number] -= 1
        self._send(StepFinished(number, name, seconds))
        if device.left[number] > 0:
            return
        del device.left[number]
        left = len(trial.steps_s) - self._done[number]
        self._send(LeaseEnded(number, name, left) if left else TrialEnded(number))

    def _push(self, at: float, name: str, number: int | None) -> None:
        self._order += 1
        heapq.heappush(self._queue, (at, self._order, name, number))
