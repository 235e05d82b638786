"""Any order of events leaves the lease machine valid; studies end near their bound."""

import heapq
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from shoal.scheduler.leases import (
    DeviceJoined,
    DeviceLost,
    GrantLease,
    Held,
    LeaseEnded,
    Leases,
    Released,
    StepFinished,
    TrialAdded,
    TrialEnded,
)
from shoal.scheduler.policy import Fifo, LongestRemainingFirst, Random

DEVICES = ("d0", "d1", "d2")
POLICIES = (LongestRemainingFirst, Fifo, lambda: Random(random.Random(1)))
LEASE_S = 4.0


def places(lanes):
    """What trials of these lanes take of a device's places: an array one."""
    return lanes.count(None) + len({lane[0] for lane in lanes if lane})


def has_room(lane, lanes, active):
    """Whether a device with trials of ``lanes`` has a place, or a slot, for one more."""
    if lane and any(other and other[0] == lane[0] for other in lanes):
        return lane not in lanes
    return places(lanes) < active


class LeaseMachine(RuleBasedStateMachine):
    """Sends any event that could happen; keeps the truth in plain dicts beside it.

    ``left`` are the true steps of each trial; ``leased`` maps a trial to
    [its devices, steps of its lease that are left], built from instructions alone.
    """

    def __init__(self):
        super().__init__()
        self.active, self.policy = 1, POLICIES[0]
        self.leases = Leases(self.policy(), active=1, lease_s=LEASE_S)
        self.devices, self.left, self.leased = set(), {}, {}
        self.log, self.replies, self.added = [], [], 0
        self.held = False
        self.lanes, self.gangs = {}, {}

    def send(self, event):
        orders = self.leases.handle(event)
        self.log.append(event)
        self.replies.append(orders)
        for order in orders:
            self.obey(order)

    def obey(self, order):
        assert not self.held, "an order while the study is paused"
        assert order.steps > 0
        if isinstance(order, GrantLease):
            assert order.trial not in self.leased, "two leases for one trial"
            assert order.device == order.devices[0]
            assert len(set(order.devices)) == len(order.devices) == self.gangs[order.trial]
            assert set(order.devices) <= self.devices
            lane = self.lanes[order.trial]
            assert lane is None or lane not in self.lanes_on(order.device), "two in one slot"
            self.leased[order.trial] = [order.devices, order.steps]
        else:
            devices, steps = self.leased[order.trial]
            assert devices[0] == order.device
            assert steps >= 1, "the worker had reached the end before it heard"
            self.leased[order.trial][1] += order.steps
        if self.left[order.trial] is not None:
            assert self.leased[order.trial][1] <= self.left[order.trial]

    # Events

    @precondition(lambda self: not self.log)
    @rule(active=st.integers(1, 3), policy=st.sampled_from(POLICIES))
    def configure(self, active, policy):
        self.active, self.policy = active, policy
        self.leases = Leases(policy(), active=active, lease_s=LEASE_S)

    @rule(device=st.sampled_from(DEVICES))
    def join_or_lose(self, device):
        if device not in self.devices:
            self.devices.add(device)
            self.send(DeviceJoined(device))
            return
        lost = self.trials_on(device)
        self.devices.discard(device)
        for trial in lost:
            del self.leased[trial]
            if self.left[trial] is not None:
                self.left[trial] += 1  # the last step was not stored
        self.send(DeviceLost(device, {trial: self.left[trial] for trial in lost}))

    @rule(
        steps=st.one_of(st.none(), st.integers(1, 30)),
        step_s=st.sampled_from((0.1, 1.0, 9.0)),
        switch_s=st.sampled_from((0.0, 0.5)),
        lane=st.one_of(st.none(), st.tuples(st.sampled_from("ab"), st.integers(0, 2))),
        gang=st.integers(1, 4),
    )
    def add(self, steps, step_s, switch_s, lane, gang):
        number, self.added = self.added, self.added + 1
        gang = 1 if lane else gang
        self.left[number] = steps
        self.lanes[number], self.gangs[number] = lane, gang
        self.send(TrialAdded(number, steps, step_s, switch_s, lane, gang))

    def trials_on(self, device):
        return [trial for trial, (devices, _) in self.leased.items() if device in devices]

    def lanes_on(self, device):
        return [self.lanes[trial] for trial in self.trials_on(device)]

    @precondition(lambda self: any(lease[1] for lease in self.leased.values()))
    @rule(data=st.data(), seconds=st.sampled_from((0.0, 0.5, 2.0)), count=st.integers(1, 4))
    def finish_steps(self, data, seconds, count):
        trial = data.draw(st.sampled_from(sorted(t for t, x in self.leased.items() if x[1])))
        for _ in range(count):
            if not self.leased[trial][1]:
                return
            self.leased[trial][1] -= 1
            if self.left[trial] is not None:
                self.left[trial] -= 1
            self.send(StepFinished(trial, self.leased[trial][0][0], seconds))

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def end_lease(self, data):
        trial = data.draw(st.sampled_from(sorted(self.leased)))
        devices, _ = self.leased.pop(trial)
        self.send(LeaseEnded(trial, devices[0], self.left[trial]))

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def end_trial(self, data):
        trial = data.draw(st.sampled_from(sorted(self.left)))
        del self.left[trial]
        self.leased.pop(trial, None)
        self.send(TrialEnded(trial))

    @rule()
    def pause_or_continue(self):
        self.held = not self.held
        self.send(Held() if self.held else Released())

    # What is always true

    @invariant()
    def leases_are_those_that_were_ordered(self):
        for device in self.devices:
            assert sorted(self.leases.leased[device]) == sorted(self.trials_on(device))
            lanes = self.lanes_on(device)
            assert places(lanes) <= self.active
            slots = [lane for lane in lanes if lane]
            assert len(slots) == len(set(slots))
        assert set(self.leases.leased) == self.devices

    @invariant()
    def every_trial_with_steps_is_leased_or_waits(self):
        to_do = {t for t, left in self.left.items() if left != 0}
        assert to_do - set(self.leased) == set(self.leases.waiting)

    @invariant()
    def no_trial_waits_while_enough_devices_have_room(self):
        for trial in self.leases.waiting if not self.held else ():
            free = [name for name in self.devices if self.has_room(trial, name)]
            assert len(free) < self.gangs[trial]

    def has_room(self, trial, device):
        """Whether it may go there, beside those that are there and a gang that is to come."""
        lanes = self.lanes_on(device)
        if self.leases.called.get(device, trial) != trial:
            lanes.append(None)
        return has_room(self.lanes[trial], lanes, self.active)

    @invariant()
    def places_are_kept_for_one_waiting_trial(self):
        called = self.leases.called
        assert set(called) <= self.devices
        for trial in set(called.values()):
            assert len(called) == self.gangs[trial]
            assert trial in self.leases.waiting

    def teardown(self):
        again = Leases(self.policy(), active=self.active, lease_s=LEASE_S)
        assert [again.handle(event) for event in self.log] == self.replies


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def run_study(trials, *, devices, active=1, policy=None, step_s, seed, lanes=None):
    """Makespan of a study whose devices take turns among their trials, step by step.

    ``trials`` are numbers of steps; ``step_s`` seconds each, give or take a fifth.
    """
    rng = random.Random(seed)
    leases = Leases(policy or LongestRemainingFirst(), active=active, lease_s=LEASE_S)
    left, work = list(trials), [0.0] * len(trials)
    held, busy, queue, now = {f"d{i}": {} for i in range(devices)}, {}, [], 0.0

    def send(event):
        for order in leases.handle(event):
            held[order.device][order.trial] = held[order.device].get(order.trial, 0) + order.steps
            start(order.device)

    def start(device):
        if device in busy or not held[device]:
            return
        trial = next(iter(held[device]))
        seconds = step_s[trial] * rng.uniform(0.8, 1.2)
        busy[device] = (trial, seconds)
        heapq.heappush(queue, (now + seconds, device))

    for device in held:
        send(DeviceJoined(device))
    for trial, steps in enumerate(trials):
        send(TrialAdded(trial, steps, step_s[trial], lane=lanes[trial] if lanes else None))
    while queue:
        now, device = heapq.heappop(queue)
        trial, seconds = busy.pop(device)
        work[trial] += seconds
        left[trial] -= 1
        lease = held[device].pop(trial) - 1
        if lease:
            held[device][trial] = lease  # to the back of the queue
        send(StepFinished(trial, device, seconds))
        if trial not in held[device]:
            ended = LeaseEnded(trial, device, left[trial]) if left[trial] else TrialEnded(trial)
            send(ended)
        start(device)
    assert left == [0] * len(trials)
    return now, max(sum(work) / devices, max(work))


@settings(max_examples=60, deadline=None)
@given(
    trials=st.lists(st.integers(1, 120), min_size=1, max_size=12),
    devices=st.integers(1, 5),
    active=st.integers(1, 3),
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 1000),
)
def test_every_trial_gets_all_its_steps(trials, devices, active, policy, seed):
    rng = random.Random(seed)
    step_s = [0.5 * 4 ** rng.random() for _ in trials]
    run_study(trials, devices=devices, active=active, policy=policy(), step_s=step_s, seed=seed)


@settings(max_examples=60, deadline=None)
@given(
    trials=st.lists(
        st.tuples(
            st.integers(1, 60),
            st.one_of(st.none(), st.tuples(st.sampled_from("ab"), st.integers(0, 3))),
        ),
        min_size=1,
        max_size=14,
    ),
    devices=st.integers(1, 4),
    active=st.integers(1, 3),
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 1000),
)
def test_every_trial_gets_all_its_steps_beside_arrays(trials, devices, active, policy, seed):
    rng = random.Random(seed)
    step_s = [0.5 * 4 ** rng.random() for _ in trials]
    run_study(
        [steps for steps, _ in trials],
        devices=devices,
        active=active,
        policy=policy(),
        step_s=step_s,
        seed=seed,
        lanes=[lane for _, lane in trials],
    )


@settings(max_examples=60, deadline=None)
@given(
    trials=st.lists(st.integers(20, 200), min_size=1, max_size=14),
    devices=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_a_study_ends_within_a_few_leases_of_its_bound(trials, devices, seed):
    rng = random.Random(seed)
    step_s = [0.5 * 4 ** rng.random() for _ in trials]
    makespan, bound = run_study(trials, devices=devices, step_s=step_s, seed=seed)
    assert makespan <= 1.05 * bound + LEASE_S


def test_twelve_equal_trials_share_eight_devices_within_a_lease_of_the_bound():
    makespan, bound = run_study([300] * 12, devices=8, step_s=[1.0] * 12, seed=0)
    assert makespan <= 1.01 * bound + LEASE_S
