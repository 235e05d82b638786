"""Ranks of those that go on after a rung."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.search import Ranks, Search
from shoal.search.rules import Halving, Median

VALUES = st.lists(st.floats(0, 1), min_size=12, max_size=12)


def searched(values, *, size=6, rule=None, rungs=9):
    """A search whose trials all came to the rungs that they were let to."""
    search = Search(size, rule or Halving("min"))
    for number in range(len(values)):
        search.enroll(number, {"x": number})
        search.ends_at(number, rungs, every=1)
    for at in range(1, rungs + 1):
        for number, value in enumerate(values):
            if search.pruned_at(number) is None:
                search.report(number, at, value + at / 100)
        search.decide()
    return search


def ranks_at(search, rung, group=lambda number: "a"):
    found = Ranks(search, group)
    return {n: rank for n in range(12) if (rank := found.after(n, rung)) is not None}


def test_those_that_go_on_are_ranked_after_those_of_earlier_generations():
    values = [0.1, 0.9, 0.2, 0.8, 0.7, 0.6, 0.5, 0.05, 0.9, 0.9, 0.9, 0.9]
    found = ranks_at(searched(values), 1)
    assert {n: r.place for n, r in found.items()} == {0: 0, 2: 1, 6: 2, 7: 3}
    assert {r.trials for r in found.values()} == {4}  # two of each of two generations


@given(VALUES)
def test_places_are_dealt_without_gaps_and_in_order(values):
    search = searched(values)
    for rung in (1, 3):
        found = ranks_at(search, rung)
        going = [n for n in range(12) if search.goes_on_after(n, rung)]
        assert list(found) == [n for n in going if n in found]
        assert [found[n].place for n in found] == [going.index(n) for n in found]


@given(VALUES)
def test_groups_are_ranked_by_themselves(values):
    search = searched(values)
    found = ranks_at(search, 1, lambda number: "ab"[number % 2])
    for group in (0, 1):
        mine = [rank.place for n, rank in found.items() if n % 2 == group]
        assert len(set(mine)) == len(mine)
    assert ranks_at(search, 1, lambda number: "") == {}


def test_where_most_are_left_nobody_gets_another_seat():
    values = [n / 12 for n in range(12)]
    search = searched(values, rule=Median("min"), rungs=3, size=12)
    found = [set(ranks_at(search, rung)) for rung in (1, 2)]
    assert found[0] == set(range(6))  # the better half, and no more than half
    assert found[1] == set(range(3))


def test_a_rung_that_is_not_decided_has_no_ranks():
    search = Search(6, Halving("min"))
    for number in range(6):
        search.enroll(number, {"x": number})
        search.ends_at(number, 9, every=1)
    for number in range(5):
        search.report(number, 1, number / 10)
    search.decide()
    assert ranks_at(search, 1) == {}


@pytest.mark.parametrize("brackets", [1, 2])
def test_trials_of_other_brackets_are_not_counted(brackets):
    rule = Halving("min", brackets=brackets)
    search = searched([n / 12 for n in range(12)], rule=rule, size=12)
    found = ranks_at(search, 1)
    assert {rule.cohort(n) for n in found} == {0}
    assert sorted(r.place for r in found.values()) == list(range(len(found)))
