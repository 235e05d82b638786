"""Orders that are repeated, whatever ends between them: no trial is added by accident."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.control import CloneTrial, ExtendTrials
from shoal.launch.growing import Grown, Order, grow
from shoal.resume import (
    StudyRecord,
    TrialRecord,
    record_from_json,
    record_to_json,
    with_points,
)
from shoal.resume.recipe import record_of

RATES = (0.1, 0.2, 0.3)
ASKED = 2
CLONES = st.builds(
    CloneTrial,
    trial=st.integers(0, ASKED - 1),
    changes=st.dictionaries(st.just("lr"), st.sampled_from(RATES)),
    warm=st.booleans(),
)
REPEATABLE = CLONES | st.builds(ExtendTrials, trials=st.integers(1, 3))
EMPTY = StudyRecord(
    name="sweep",
    space="lr",
    trials=tuple(TrialRecord(number=n, hp={"lr": 1.0 + n}, seed=n) for n in range(ASKED)),
    epochs=3,
    steps=None,
    eval_every=None,
    metric="valid_loss",
    mode="min",
    seed=0,
    recipe=record_of({}, {}),
)


def more_points(record: StudyRecord, more: int) -> StudyRecord:
    """More of a space whose n-th point is the rate n + 1."""
    return with_points(record, [{"lr": 1.0 + n} for n in range(record.sampled + more)], more)


def give(record: StudyRecord, order: Order, ended: set[int], time: float = 0.0) -> Grown:
    """What an order comes to in a study that is opened again, as after a kill."""
    stored = record_from_json(record_to_json(record))
    return grow(stored, order, more_points, ended=ended, time=time)


def forced(order: Order) -> Order:
    return replace(order, again=True)


@st.composite
def histories(draw: st.DrawFn) -> tuple[StudyRecord, set[int]]:
    """A study that was given some orders while some of its trials ended."""
    record, ended = EMPTY, set[int]()
    for time in range(draw(st.integers(0, 4))):
        order = draw(REPEATABLE)
        record = give(record, forced(order) if draw(st.booleans()) else order, ended, time).record
        ended |= draw(_some(record))
    return record, ended


def _some(record: StudyRecord) -> st.SearchStrategy[set[int]]:
    return st.sets(st.sampled_from([trial.number for trial in record.trials]))


def _numbers(record: StudyRecord) -> Sequence[int]:
    return [trial.number for trial in record.trials]


@settings(deadline=None)
@given(histories(), REPEATABLE, st.data())
def test_an_order_that_is_repeated_before_its_trials_have_ended_adds_nothing(
    history: tuple[StudyRecord, set[int]], order: Order, data: st.DataObject
) -> None:
    record, ended = history
    first = give(record, order, ended)

    for _ in range(3):
        ended |= data.draw(_some(first.record))
        assume(not ended.issuperset(first.trials))
        again = give(first.record, order, ended, 9.0)
        assert (again.record, again.trials, again.is_new) == (first.record, first.trials, False)


@settings(deadline=None)
@given(histories(), REPEATABLE)
def test_an_order_whose_trials_have_all_ended_is_a_new_wish(
    history: tuple[StudyRecord, set[int]], order: Order
) -> None:
    record, _ = history
    ended = set(_numbers(record))

    grown = give(record, order, ended, 9.0)

    assert grown.is_new
    assert len(grown.trials) == (order.trials if isinstance(order, ExtendTrials) else 1)


@settings(deadline=None)
@given(histories(), REPEATABLE)
def test_an_order_by_force_always_adds(
    history: tuple[StudyRecord, set[int]], order: Order
) -> None:
    record, ended = history

    grown = give(record, forced(order), ended, 9.0)

    assert grown.is_new
    assert not set(grown.trials) & set(_numbers(record))


@settings(deadline=None)
@given(histories(), REPEATABLE, st.integers(0, 3))
def test_what_an_order_adds_is_numbered_on_and_on_record_with_it(
    history: tuple[StudyRecord, set[int]], order: Order, missing: int
) -> None:
    record, ended = history
    before = len(record.trials)

    for wanted in (order, ExtendTrials(to=before + missing)) if before + missing else (order,):
        grown = give(record, wanted, ended, 9.0)
        added = grown.trials if grown.is_new else ()
        assert _numbers(grown.record) == [*_numbers(record), *added]
        assert list(added) == list(range(before, before + len(added)))
        assert grown.record.trials[:before] == record.trials
        new = grown.record.additions[len(record.additions) :]
        is_kept = grown.is_new and wanted is order
        assert [addition.trials for addition in new] == [added] * is_kept


@settings(deadline=None)
@given(histories(), st.integers(0, 5))
def test_so_many_in_all_are_so_many_however_often_it_is_ordered(
    history: tuple[StudyRecord, set[int]], missing: int
) -> None:
    record, ended = history
    order = ExtendTrials(to=len(record.trials) + missing)

    first = give(record, order, ended)
    again = give(first.record, order, ended)

    assert len(first.record.trials) == order.to
    assert first.is_new is bool(missing)
    assert (again.record, again.is_new) == (first.record, False)


@settings(deadline=None)
@given(histories(), REPEATABLE, REPEATABLE)
def test_what_another_order_added_is_not_this_ones(
    history: tuple[StudyRecord, set[int]], order: Order, other: Order
) -> None:
    record, _ = history
    ended = set(_numbers(record))
    first = give(record, other, ended)

    second = give(first.record, order, ended, 9.0)

    assert second.is_new is not _are_equal(order, other)


def _are_equal(one: Order, other: Order) -> bool:
    if isinstance(one, CloneTrial) and isinstance(other, CloneTrial):
        values = [EMPTY.trial(order.trial).hp | order.changes for order in (one, other)]
        is_same_value = values[0] == values[1]
        return is_same_value and (one.trial, one.warm) == (other.trial, other.warm)
    return one == other


@settings(deadline=None)
@given(st.lists(REPEATABLE, max_size=4))
def test_the_orders_of_one_call_stand_for_one_addition_each(orders: list[Order]) -> None:
    def call(record: StudyRecord) -> StudyRecord:
        claimed = set[int]()
        for order in orders:
            grown = grow(record, order, more_points, ended=(), time=0.0, claimed=claimed)
            record = grown.record
            claimed.update(grown.trials)
        return record

    record = call(EMPTY)

    assert len(record.additions) == len(orders)
    assert call(record) == record
