"""Code that runs in turns: who runs when, who is answered together, and what ends it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import types

import pytest

from shoal.fusion.passes.meeting import Abandoned, Lanes, Run, current_run, in_turns


def ask(key, asked=None):
    return current_run().ask(key, asked)


def together(works, answer, turn=lambda slot: contextlib.nullcontext()):
    lanes = Lanes()
    runs = [Run(i, work, contextlib.nullcontext, lanes) for i, work in enumerate(works)]
    in_turns(runs, answer, turn)
    return runs


def test_one_runs_at_a_time_in_the_order_of_slots():
    heard, here = [], []

    def work(name):
        for round_ in range(2):
            here.append(name)
            time.sleep(0.001)
            assert here == [name]
            heard.append((round_, name))
            here.clear()
            ask("round")

    def answer(group, are_all):
        assert are_all

    together([lambda: work("a"), lambda: work("b")], answer)
    assert heard == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]


def test_those_that_ask_for_the_same_are_answered_together():
    groups = []

    def answer(group, are_all):
        groups.append(([run.slot for run in group], are_all))
        for run in group:
            run.answer(run.asked * 10)

    works = [lambda: ask("x", 1) + ask("y", 2), lambda: ask("x", 3), lambda: ask("z", 4)]
    runs = together(works, answer)
    assert [run.result for run in runs] == [30, 30, 40]
    assert groups == [([0, 1], False), ([2], False), ([0], True)]


def test_those_that_asked_for_other_things_before_are_not():
    groups = []

    def answer(group, are_all):
        groups.append([run.slot for run in group])

    together([lambda: (ask("x"), ask("z")), lambda: (ask("y"), ask("z"))], answer)
    assert groups == [[0], [1], [0], [1]]


def test_what_one_raises_is_its_own():
    def answer(group, are_all):
        for run in group:
            if run.asked == "bad":
                run.fail(KeyError("told so"))
            else:
                run.answer("fine")

    def raises():
        raise ValueError("mine")

    runs = together([raises, lambda: ask("x", "bad"), lambda: ask("x", "good")], answer)
    assert [type(run.failure) for run in runs] == [ValueError, KeyError, type(None)]
    assert runs[2].result == "fine"


def test_when_the_driver_fails_all_leave_their_code():
    left = []

    def work():
        try:
            ask("x")
        except Exception:  # what it is left by is no Exception
            left.append("caught")
        finally:
            left.append("left")

    def answer(group, are_all):
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        together([work, work], answer)
    assert left == ["left", "left"]


def test_code_that_asks_while_it_is_left_is_left_again():
    def work():
        try:
            ask("x")
        finally:
            with contextlib.suppress(Abandoned):
                ask("y")

    def answer(group, are_all):
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        together([work], answer)


def test_turns_are_entered_around_each():
    heard = []

    @contextlib.contextmanager
    def turn(slot):
        heard.append(("in", slot))
        yield
        heard.append(("out", slot))

    together([lambda: ask("x")], lambda group, are_all: None, turn)
    assert heard == [("in", 0), ("out", 0)] * 2


def interrupted_while(runs, instant):
    """A turn in which Ctrl-C comes at one instant, as an error of the lock or of the lanes."""
    run = runs[0]

    def interrupt(*args):
        raise KeyboardInterrupt

    if instant == "waiting":
        run._there = types.SimpleNamespace(acquire=interrupt, release=run._there.release)
    elif instant == "waking":
        run._go = types.SimpleNamespace(acquire=run._go.acquire, release=interrupt)
    else:
        run._lanes = types.SimpleNamespace(submit=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.take_turn()


@pytest.mark.parametrize("instant", ["starting", "waking", "waiting"])
def test_a_turn_that_ctrl_c_ended_leaves_its_lane_free(instant):
    lanes, heard = Lanes(), []
    runs = [Run(i, lambda: ask("x"), contextlib.nullcontext, lanes) for i in range(2)]
    locks = runs[0]._go, runs[0]._there
    interrupted_while(runs, instant)
    runs[0]._go, runs[0]._there = locks
    runs[0]._lanes = lanes
    for run in runs:
        run.close()
    assert all(run.is_over for run in runs)
    again = [Run(i, lambda: heard.append(1), contextlib.nullcontext, lanes) for i in range(2)]
    in_turns(again, lambda group, are_all: None, lambda slot: contextlib.nullcontext())
    assert heard == [1, 1]


# Python itself drops the interrupt where it comes within a weak reference's callback
# (threads are kept in weak sets), and tells of it: it is then one that did not come.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_time_ends_the_turns_and_no_more():
    lanes = Lanes()

    def work():
        end = time.monotonic() + 0.003
        while time.monotonic() < end:
            pass
        ask("x")

    for number in range(20):
        runs = [Run(i, work, contextlib.nullcontext, lanes) for i in range(3)]
        delay = 0.002 + 0.0005 * number
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        with contextlib.suppress(KeyboardInterrupt):
            timer.start()
            in_turns(runs, lambda group, are_all: None, lambda slot: contextlib.nullcontext())
            timer.join()
            time.sleep(0.05)  # where the turns ended before
        for run in runs:  # it may have come while they were closed
            run.close()
        assert all(run.is_over for run in runs)


def test_threads_are_kept_and_end_with_their_owner():
    lanes, names = Lanes(), []
    for _ in range(3):
        run = Run(0, lambda: names.append(threading.get_ident()), contextlib.nullcontext, lanes)
        in_turns([run], lambda group, are_all: None, lambda slot: contextlib.nullcontext())
    assert len(set(names)) == 1
    (thread,) = (t for t in threading.enumerate() if t.ident == names[0])
    del lanes, run
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()
