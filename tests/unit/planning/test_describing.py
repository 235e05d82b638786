"""Trials are described by all workers, a few at a time, and whoever ends one is to blame alone."""

from __future__ import annotations

import pytest

from shoal.core.errors import SpecError, TooLarge, TrialError
from shoal.core.spec import TrialSpec
from shoal.core.technique import Resident
from shoal.planning.asking import EACH, MAX_DEATHS, Asking
from shoal.planning.planned import Settled
from shoal.runtime.pool import Gone
from shoal.runtime.wire.messages import Described, Measure, Measured, Refused
from shoal.testing import make_measure

TRIALS = [TrialSpec(number=n, hp={}, seed=n) for n in range(3 * EACH + 1)]


class FakeWorker:
    def __init__(self, pool):
        self.pool, self.running, self.last_words, self.orders = pool, set(), "", []

    def send(self, order):
        self.orders.append(order)
        self.pool.inbox.append((self, order))


class FakePool:
    """Workers answer the last order first, as ``answer`` says; one that is gone is replaced."""

    def __init__(self, count, answer):
        self.inbox, self.answer = [], answer
        self.workers = {f"cpu:{n}": FakeWorker(self) for n in range(count)}

    def receive(self):
        worker, order = self.inbox.pop()
        reply = self.answer(worker, order)
        if isinstance(reply, Gone):
            name = next(n for n, one in self.workers.items() if one is worker)
            self.workers[name] = FakeWorker(self)
        return worker, reply

    @property
    def orders(self):
        return [order for worker in self.workers.values() for order in worker.orders]


def fine(worker, order):
    return Described({t.number: "s" for t in order.trials}, {}, arrays={})


def described(count, answer=fine, trials=TRIALS):
    pool = FakePool(count, answer)
    asking = Asking(pool, pool.receive, 1.0)
    return asking.describe(trials), pool, asking


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_trial_is_described_once_by_whichever_worker_is_free(count):
    found, pool, _ = described(count)
    assert found.signatures == {t.number: "s" for t in TRIALS}
    asked = sorted(t.number for order in pool.orders for t in order.trials)
    assert asked == [t.number for t in TRIALS]
    assert all(len(order.trials) <= EACH for order in pool.orders)
    assert sum(bool(worker.orders) for worker in pool.workers.values()) == min(count, 4)


def test_trials_are_described_in_their_order_whichever_worker_answers_first():
    """What a plan says of them, and of which one first, follows from that."""
    found, _, _ = described(2)
    assert list(found.signatures) == [t.number for t in TRIALS]


def test_few_trials_keep_one_worker_busy():
    _, pool, _ = described(2, trials=TRIALS[:EACH])
    assert [len(worker.orders) for worker in pool.workers.values()] == [1, 0]


def test_a_trial_that_ends_its_worker_again_and_again_fails_and_the_others_are_described():
    bad = 2 * EACH + 1

    def answer(worker, order):
        if bad in {t.number for t in order.trials}:
            worker.running, worker.last_words = {bad}, "Fatal"
            return Gone("signal 9")
        return fine(worker, order)

    found, _, asking = described(2, answer)
    assert found.signatures.keys() == {t.number for t in TRIALS} - {bad}
    assert asking.failures.keys() == {bad}
    assert f"died {MAX_DEATHS} times" in asking.failures[bad]


def test_errors_are_the_trials_own():
    def answer(worker, order):
        errors = {t.number: "ValueError: odd" for t in order.trials if t.number % 2}
        signatures = {t.number: "s" for t in order.trials if t.number % 2 == 0}
        return Described(signatures, errors)

    found, _, asking = described(2, answer)
    assert asking.failures.keys() == {t.number for t in TRIALS if t.number % 2}
    assert found.signatures.keys() == {t.number for t in TRIALS if t.number % 2 == 0}


def test_where_none_can_be_built_the_cause_of_the_first_is_raised():
    def answer(worker, order):
        first = order.trials[0].number
        return Described({}, {t.number: "no" for t in order.trials}, SpecError(f"at {first}"))

    with pytest.raises(SpecError, match=r"at 0$"):
        described(3, answer)
    with pytest.raises(TrialError, match="none of 25 trials can run; trial 0 says:\nno"):
        described(3, lambda w, order: Described({}, {t.number: "no" for t in order.trials}))


# -- refused while they are measured --------------------------------------------------------


def settled(refused, words=str):
    """What is settled of trials of two shapes; those in ``refused`` cannot be asked for."""

    def answer(worker, order):
        trial = order.trial
        if trial.number in refused:
            error = SpecError(words(trial.number))
            return Refused(trial.number, f"SpecError: {error}", error)
        return Measured(trial.number, make_measure(), None)

    def question(trial):
        measured = yield Measure(trial, cut=False)
        why = (f"by {trial.number}",)
        values = {"measure": measured.measure, "layout": None, "technique": Resident()}
        return Settled(**values, why=why, active=1)

    pool = FakePool(1, answer)
    asking = Asking(pool, pool.receive, 1.0)
    alike = {"even": TRIALS[0:20:2], "odd": TRIALS[1:20:2]}
    found = asking.settle(alike, question)
    return {kind: one.why[0] for kind, one in found.items()}, asking, pool


def test_a_trial_that_cannot_be_asked_for_fails_and_another_of_its_shape_speaks_for_the_rest():
    found, asking, _ = settled({0, 1, 2})
    assert found == {"even": "by 4", "odd": "by 3"}
    assert asking.failures == {n: f"SpecError: {n}" for n in (0, 1, 2)}


def test_what_two_of_a_shape_were_refused_for_is_the_whole_shapes_and_no_others():
    found, asking, pool = settled(set(range(0, 20, 2)), words=lambda number: "no norm")
    assert found == {"odd": "by 1"}
    assert asking.failures.keys() == set(range(0, 20, 2))
    assert len(pool.orders) == 3


def test_where_all_are_refused_the_first_refusal_is_the_studys():
    with pytest.raises(SpecError, match=r"^0$"):
        settled(set(range(20)))


# -- too large ------------------------------------------------------------------------------


def ask_for(kinds, large):
    """Settle trials of these kinds, of which those that speak for ``large`` kinds do not fit."""

    def question(trial):
        measured = yield Measure(trial, cut=False)
        kind = next(kind for kind, trials in kinds.items() if trial in trials)
        if kind in large:
            raise TooLarge(f"trial {trial.number} needs 8 B. Give the device that much.")
        values = {"measure": measured.measure, "layout": None, "technique": Resident()}
        return Settled(**values, why=(), active=1)

    pool = FakePool(2, lambda w, order: Measured(order.trial.number, make_measure(), None))
    return Asking(pool, pool.receive, 1.0).settle(kinds, question)


def test_all_trials_that_do_not_fit_are_named_after_what_the_first_one_needs():
    kinds = {"a": TRIALS[5:6], "b": TRIALS[1:5], "c": TRIALS[6:10], "d": TRIALS[10:11]}
    words = (
        r"^trial 1 needs 8 B\. Give the device that much\. "
        r"6 of 10 trials do not fit: 1 to 5, 10\.$"
    )
    with pytest.raises(TooLarge, match=words):
        ask_for(kinds, {"a", "b", "d"})


def test_one_trial_that_does_not_fit_is_named_once():
    with pytest.raises(TooLarge, match=r"that much\.$"):
        ask_for({"a": TRIALS[:3], "b": TRIALS[3:4]}, {"b"})
