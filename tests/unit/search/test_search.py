"""A search whose record is older than its trials, or whose generations grow."""

import math

from shoal.search import Search
from shoal.search.rules import Halving, Median


def search_of(rule, *, size=2, trials=2):
    search = Search(size, rule)
    for number in range(trials):
        search.enroll(number, {})
    return search


def test_values_that_are_lost_shift_no_others():
    search = search_of(Median("min"))
    for number in (0, 1):
        for step in (10, 20, 50):  # of 30 and 40 nothing is on record
            search.report(number, step, step / 10 + number)
        search.ends_at(number, 9, every=10, done=50)
    facts = search._facts[0]
    assert [facts.at(rung) for rung in range(1, 7)] == [1.0, 2.0, None, None, 5.0, None]
    search.decide()
    assert search.pruned_at(0) is search.pruned_at(1) is None
    assert search.next_rung(0, 5) == 6  # nobody waits for what never comes
    assert search.is_known_at(0, 4)
    assert not search.is_known_at(0, 6)


def test_a_last_evaluation_between_two_rungs_belongs_to_the_last_one():
    search = search_of(Median("min"))
    search.ends_at(0, 3, every=10)
    search.report(0, 25, 1.0)
    assert search._facts[0].at(3) == 1.0


def test_who_is_past_a_rung_waits_at_a_later_one_when_its_generation_grows():
    search = search_of(Halving("min"), size=3)
    for number, value in ((0, 1.0), (1, 2.0)):
        search.ends_at(number, 9, every=10)
        search.report(number, 10, value)
    search.decide()
    assert search.pruned_at(1) == 1
    assert search.next_rung(0) == 3
    search.enroll(2, {})  # one more of the same generation, at its beginning
    assert search.next_rung(2) == 1
    assert search.next_rung(0) == 1
    assert search.next_rung(0, 2) == 3  # it has done more than the first rung already


def test_a_value_that_is_no_number_is_lost_for_nobody():
    search = search_of(Median("min"))
    search.report(0, 10, math.nan)
    assert math.isnan(search._facts[0].until()[1])
