"""Gangs beside single trials: all or nothing, never too many on a device, and all of them end."""

import heapq
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.scheduler.leases import (
    DeviceJoined,
    DeviceLost,
    ExtendLease,
    GrantLease,
    LeaseEnded,
    Leases,
    StepFinished,
    TrialAdded,
    TrialEnded,
)
from shoal.scheduler.policy import Fifo, LongestRemainingFirst, Random

POLICIES = (LongestRemainingFirst, Fifo, lambda: Random(random.Random(1)))
LEASE_S = 4.0


class Work:
    """A trial: what it has left to do, and its lease while it has one."""

    def __init__(self, steps, gang=1, step_s=1.0):
        self.steps, self.gang, self.step_s = steps, gang, step_s
        self.devices, self.granted, self.running = (), 0, None


class Workers:
    """Plays the workers: a step takes all devices of its trial at a time, give or take a fifth.

    Trials take turns; one that waits for some of its devices keeps the others from those behind
    it, or a gang would never have all of them. ``when_ended`` hears of trials that are done.
    """

    def __init__(self, *, devices, active=1, policy=LongestRemainingFirst, seed=0):
        self.leases = Leases(policy(), active=active, lease_s=LEASE_S)
        self.active, self.rng = active, random.Random(seed)
        self.devices, self.trials, self.turns = set(), {}, []
        self.now, self.queue, self.serial = 0.0, [], itertools.count()
        self.log, self.replies, self.spent_s, self.moves = [], [], 0.0, 0
        self.when_ended = lambda number: None
        for index in range(devices):
            self.join(f"d{index}")

    # Events

    def join(self, device):
        self.devices.add(device)
        self.send(DeviceJoined(device))

    def add(self, number, work):
        self.trials[number] = work
        switch_s = 0.1 * work.step_s
        self.send(TrialAdded(number, work.steps, work.step_s, switch_s, gang=work.gang))

    def lose(self, device, down_s):
        """The steps that were under way there are lost, some with the step before."""
        if device not in self.devices:
            return
        self.devices.discard(device)
        lost = [n for n, work in self.trials.items() if device in work.devices]
        for number in lost:
            self.trials[number].steps += self.rng.randint(0, 1)
            self.release(number)
        self.send(DeviceLost(device, {number: self.trials[number].steps for number in lost}))
        self.at(self.now + down_s, self.join, device)

    def finish_step(self, number, serial, seconds):
        work = self.trials.get(number)
        if work is None or work.running != serial:
            return  # a device of it was lost meanwhile
        work.running = None
        work.steps, work.granted = work.steps - 1, work.granted - 1
        leader = work.devices[0]
        self.send(StepFinished(number, leader, seconds))
        if work.steps == 0:
            self.release(number)
            del self.trials[number]
            self.send(TrialEnded(number))
            self.when_ended(number)
        elif work.granted == 0:
            self.release(number)
            self.send(LeaseEnded(number, leader, work.steps))

    def release(self, number):
        work = self.trials[number]
        work.devices, work.granted, work.running = (), 0, None
        self.turns.remove(number)

    # Orders

    def send(self, event):
        orders = self.leases.handle(event)
        self.log.append(event)
        self.replies.append(orders)
        for order in orders:
            self.obey(order)
        self.check()
        self.start_steps()

    def obey(self, order):
        work = self.trials[order.trial]
        assert order.steps > 0
        if isinstance(order, GrantLease):
            assert not work.devices, "two leases for one trial"
            assert order.device == order.devices[0]
            assert len(order.devices) == len(set(order.devices)) == work.gang, "all or nothing"
            assert set(order.devices) <= self.devices
            work.devices = order.devices
            self.turns.append(order.trial)
            self.moves += 1
        else:
            assert isinstance(order, ExtendLease)
            assert order.device == work.devices[0]
            assert work.granted > 0, "the worker had reached the end before it heard"
        work.granted += order.steps
        assert work.granted <= work.steps

    def check(self):
        """What is true after every event."""
        for device in self.devices:
            here = sorted(n for n, work in self.trials.items() if device in work.devices)
            assert len(here) <= self.active
            assert sorted(self.leases.leased[device]) == here
        waiting = {n for n, work in self.trials.items() if not work.devices}
        assert waiting == set(self.leases.waiting)
        callers = set(self.leases.called.values())
        assert callers <= waiting
        assert len(callers) <= 1, "two gangs wait for each other"
        assert set(self.leases.called) <= self.devices
        for number in waiting:
            assert self.trials[number].gang > self.count_free(number), "there is room for it"

    def count_free(self, number):
        """Devices with room for the trial, without the places that are kept for another."""
        kept = {d for d, gang in self.leases.called.items() if gang != number}
        held = [d for work in self.trials.values() for d in work.devices]
        return sum(held.count(d) + (d in kept) < self.active for d in self.devices)

    def start_steps(self):
        taken = {d for work in self.trials.values() if work.running for d in work.devices}
        for number in list(self.turns):
            work = self.trials[number]
            if work.granted and not work.running and not taken & set(work.devices):
                self.start_step(number, work)
            taken |= set(work.devices)

    def start_step(self, number, work):
        seconds = work.step_s * self.rng.uniform(0.8, 1.2)
        self.spent_s += seconds * work.gang
        work.running = next(self.serial) + 1
        self.turns.remove(number)
        self.turns.append(number)
        self.at(self.now + seconds, self.finish_step, number, work.running, seconds)

    # Time

    def at(self, when, what, *arguments):
        heapq.heappush(self.queue, (when, next(self.serial), what, arguments))

    def run(self):
        while self.queue:
            self.step()

    def run_while(self, number, until):
        """Until the trial has ended, or that time is over."""
        while number in self.trials and self.now < until:
            self.step()

    def step(self):
        self.now, _, what, arguments = heapq.heappop(self.queue)
        what(*arguments)

    def replay(self, policy):
        """What another machine says to the same events."""
        again = Leases(policy(), active=self.active, lease_s=LEASE_S)
        return [again.handle(event) for event in self.log]


works = st.builds(
    Work, st.integers(1, 60), st.integers(1, 4), st.sampled_from((0.1, 0.5, 1.0, 3.0, 9.0))
)
faults = st.lists(st.tuples(st.floats(0, 200), st.integers(0, 3), st.floats(0.1, 50)), max_size=6)


@settings(max_examples=200, deadline=None)
@given(
    trials=st.lists(works, min_size=1, max_size=12),
    devices=st.integers(1, 4),
    active=st.integers(1, 3),
    policy=st.sampled_from(POLICIES),
    faults=faults,
    seed=st.integers(0, 1000),
)
def test_every_gang_that_there_are_devices_for_ends(trials, devices, active, policy, faults, seed):
    workers = Workers(devices=devices, active=active, policy=policy, seed=seed)
    for number, work in enumerate(trials):
        workers.add(number, work)
    for when, index, down_s in faults:
        workers.at(when, workers.lose, f"d{index}", down_s)
    workers.run()
    too_large = {n for n, work in enumerate(trials) if work.gang > devices}
    assert set(workers.trials) == too_large
    assert workers.replay(policy) == workers.replies


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(
    gang=st.integers(2, 4),
    spare=st.integers(0, 2),
    active=st.integers(1, 3),
    more=st.integers(0, 12),
    policy=st.sampled_from(POLICIES),
    steps=st.sampled_from((10, 40)),
    seed=st.integers(0, 1000),
)
def test_a_gang_ends_although_single_trials_keep_coming(
    gang, spare, active, more, policy, steps, seed
):
    # Given at least as many single trials as places, and a new one for each that ends
    devices = gang + spare
    workers = Workers(devices=devices, active=active, policy=policy, seed=seed)
    keep_adding(workers, devices * active + more, lambda: Work(steps))
    # When a gang comes, then it ends while each of its neighbours' places is taken a few times
    workers.add(0, Work(steps, gang))
    workers.run_while(0, until=100 * steps)
    assert workers.now <= 20 * active * steps


@settings(max_examples=40, deadline=None)
@given(
    gang=st.integers(2, 4),
    spare=st.integers(0, 1),
    active=st.integers(1, 2),
    more=st.integers(0, 4),
    policy=st.sampled_from(POLICIES),
    steps=st.sampled_from((5, 30, 60)),
    seed=st.integers(0, 1000),
)
def test_a_single_trial_ends_although_gangs_keep_coming(
    gang, spare, active, more, policy, steps, seed
):
    workers = Workers(devices=gang + spare, active=active, policy=policy, seed=seed)
    keep_adding(workers, active + more, lambda: Work(30, gang))
    workers.add(0, Work(steps))
    workers.run_while(0, until=100 * 30)
    assert workers.now <= 20 * active * 30


def keep_adding(workers, count, make):
    """``count`` trials, and another one for each that ends."""
    numbers = itertools.count(1)
    workers.when_ended = lambda ended: workers.add(next(numbers), make())
    for _ in range(count):
        workers.add(next(numbers), make())


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_trials_and_gangs_end_near_their_bound(devices):
    rng = random.Random(devices)
    workers = Workers(devices=devices)
    for number in range(3 * devices):
        workers.add(number, Work(rng.randint(50, 200), 1 if number % 3 else 2, 0.5))
    workers.run()
    assert workers.now <= 1.05 * workers.spent_s / devices + LEASE_S
