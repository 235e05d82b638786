"""The first plan's waiting, turn by turn: who is told what, who is ended, who is replaced."""

from __future__ import annotations

import pytest

from shoal.core.errors import WorkerError
from shoal.core.event import PlanningWaited, WorkerDied, WorkerStarted, pack_event
from shoal.core.spec import DeviceSpec, TrialSpec
from shoal.core.units import Bytes
from shoal.execution.firstplan import FirstPlan
from shoal.execution.watchdog import Watchdog
from shoal.runtime.pool import Gone
from shoal.runtime.wire.messages import Broken, Describe, Described, Happened, Measure
from shoal.testing import ManualClock

STACKS = """Thread 0x00007f0000000001 (most recent call first):
  File "/lib/threading.py", line 320 in wait

Thread 0x00007f0000000002 (most recent call first):
  File "/home/ada/model.py", line 12 in build
  File "/home/ada/model.py", line 40 in <module>
"""
TRIALS = tuple(TrialSpec(number=number, hp={}, seed=0) for number in range(4))


class FakeWorker:
    """A device's worker that does what the test says."""

    def __init__(self, name="cpu:0"):
        self.device = DeviceSpec(name=name, kind="virtual", memory=Bytes(1), threads=1)
        self.name, self.pid, self.last_words, self.alive = name, 17, "", True
        self.running, self.work_done = set(), 0

    def stacks(self):
        return STACKS

    def end(self):
        self.alive = False


class FakePool:
    """Gives what it was told to, and then nothing."""

    def __init__(self, *workers):
        self.workers = {worker.name: worker for worker in workers}
        self.inbox, self.replaced, self.checks = [], [], 0

    def receive(self, timeout):
        return self.inbox.pop(0) if self.inbox else None

    def replace(self, device):
        self.replaced.append(device.name)

    def check_alive(self):
        self.checks += 1


class Turns:
    """A planner that asks what the test says, and receives when it says so."""

    def __init__(self):
        self.asked = {}

    def plan(self, trials, *, receive):
        self.receive = receive


class Table:
    """A first plan with one worker, its clock, and what it told."""

    def __init__(self, limit_s=1800.0):
        self.clock, self.told, self.worker = ManualClock(), [], FakeWorker()
        self.pool, self.planner = FakePool(self.worker), Turns()
        dog = Watchdog(least_s=60.0, first_s=limit_s)
        first = FirstPlan(
            self.planner, self.pool, dog, slow_s=60.0, sink=self.told.extend, clock=self.clock.now
        )
        first.make(TRIALS)

    def ask(self, order):
        self.planner.asked = {self.worker: order}

    def after(self, seconds, *, step_s=10.0):
        """Receive every few seconds."""
        for _ in range(round(seconds / step_s)):
            self.planner.receive()
            self.clock.advance(step_s)
        return self.planner.receive()

    def waits(self):
        return [event for event in self.told if isinstance(event, PlanningWaited)]


@pytest.fixture
def table():
    return Table()


def test_an_order_that_nobody_answers_is_told_of_every_minute(table):
    table.ask(Measure(TRIALS[3], cut=False))
    table.worker.running = {3}
    table.after(59, step_s=59)
    assert not table.waits()
    table.after(121, step_s=1)
    assert [(event.trial, event.device, event.work) for event in table.waits()] == [
        (3, "cpu:0", "measure")
    ] * 3
    assert [event.seconds for event in table.waits()] == [60.0, 120.0, 180.0]
    assert table.waits()[0].limit_s == 1800.0


def test_planning_that_takes_more_than_some_seconds_is_told_of_once(table):
    table.after(2.9, step_s=2.9)
    assert not table.told
    table.after(30, step_s=1)
    assert [event.seconds for event in table.told] == [pytest.approx(3.9)]


def test_a_quick_answer_is_not_worth_a_line(table):
    for number in range(6):
        table.ask(Measure(TRIALS[number % 2], cut=bool(number // 2 % 2)))
        table.after(50)
    assert not table.waits()


def test_of_many_trials_the_one_that_is_being_built_is_named_with_its_own_time(table):
    table.ask(Describe(TRIALS))
    for number in range(3):
        table.worker.running = {number}
        table.after(25, step_s=5)
    (wait,) = table.waits()
    assert (wait.trial, wait.work, wait.seconds) == (2, "build", 10.0)


def test_before_any_trial_s_code_runs_the_worker_is_starting(table):
    table.ask(Describe(TRIALS))
    table.after(60)
    (wait,) = table.waits()
    assert (wait.trial, wait.work) == (None, "start")


def test_a_hang_ends_the_worker_with_its_stacks_as_last_words(table):
    table.ask(Describe(TRIALS))
    table.worker.running = {1}
    table.after(1800)
    assert table.worker.alive
    table.after(10)
    assert not table.worker.alive
    words = table.worker.last_words
    assert STACKS.strip() in words
    assert words.splitlines()[-1] == (
        "it got nothing done for 1810 s, at /home/ada/model.py:12 in build; 1800 s are allowed"
    )


def test_each_order_and_each_trial_of_one_has_the_whole_time(table):
    table.ask(Describe(TRIALS))
    for number in range(4):
        table.worker.running = {number}
        table.after(1700, step_s=100)
    for cut in (False, True):
        table.ask(Measure(TRIALS[3], cut=cut))
        table.after(1700, step_s=100)
    assert table.worker.alive


def test_a_worker_that_was_asked_nothing_may_idle_for_ever(table):
    table.after(10_000, step_s=100)
    assert table.worker.alive
    assert not table.waits()


def test_a_worker_that_died_is_replaced_and_on_record(table):
    table.ask(Describe(TRIALS))
    table.worker.running, table.worker.last_words = {2}, "the words"
    table.pool.inbox = [(table.worker, Gone("process 17 ended with signal 9"))]
    assert table.after(0)[0] is table.worker
    (death,) = table.told
    assert isinstance(death, WorkerDied)
    assert death.reason == "process 17 ended with signal 9 while it measured trial 2\nthe words"
    assert table.pool.replaced == ["cpu:0"]


def test_a_worker_that_died_while_no_trial_s_code_ran_cannot_work(table):
    table.ask(Describe(TRIALS))
    table.pool.inbox = [(table.worker, Broken("ImportError: no module named ada"))]
    table.after(0)
    table.pool.inbox = [(table.worker, Gone("process 17 ended with exit code 1"))]
    with pytest.raises(WorkerError, match=r"the worker of cpu:0 cannot work.*named ada"):
        table.after(0)


TRACEBACK = """Traceback (most recent call last):
  File "shoal/pystate/parts.py", line 12, in put
AttributeError: readonly attribute
"""


def die(table, trial, error):
    table.worker.running = {trial}
    table.pool.inbox = [(table.worker, Gone("process 17 ended by an exception", error))]
    table.after(0)


def test_the_same_exception_of_several_trials_ends_the_planning_as_an_error_of_shoals(table):
    table.ask(Describe(TRIALS))
    for trial in (0, 0):
        die(table, trial, TRACEBACK)
    with pytest.raises(WorkerError) as caught:
        die(table, 1, TRACEBACK)
    assert "ended 3 workers, when it was the turn of trials 0, 1" in str(caught.value)
    assert "an error of shoal itself" in str(caught.value)
    assert str(caught.value).count("AttributeError: readonly attribute") == 1
    assert len(table.told) == 3
    assert table.pool.replaced == ["cpu:0"] * 2
    with pytest.raises(WorkerError):  # whoever waits for the others hears of it too
        table.planner.receive()


def test_a_worker_that_is_killed_ends_no_planning_however_often(table):
    table.ask(Describe(TRIALS))
    for trial in (0, 1, 2, 3) * 3:
        die(table, trial, "")
    assert len(table.pool.replaced) == 12


def test_what_happened_is_told_and_an_answer_is_handed_on(table):
    started = WorkerStarted(time=1.0, device="cpu:0", pid=17)
    answer = Described({0: "s"}, {})
    table.ask(Describe(TRIALS))
    table.pool.inbox = [
        (table.worker, Happened((pack_event(started),))),
        (table.worker, answer),
        (None, lambda: None),
    ]
    table.after(0)
    assert table.told == [started]
    assert table.after(0) == (table.worker, answer)
    assert table.after(0) is None


def test_after_some_silence_it_looks_whether_anybody_is_left(table):
    table.after(5, step_s=1)
    assert table.pool.checks == 0
    table.after(1, step_s=1)
    assert table.pool.checks > 0
