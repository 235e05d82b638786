"""The generator of rows, apart from what they are used for."""

import itertools

from covering import all_pairs, cover_pairs, cover_values, full_product, pairs_of
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = st.lists(st.integers(1, 5), min_size=2, max_size=6)


def make_factors(sizes):
    return {f"factor{index}": tuple(range(size)) for index, size in enumerate(sizes)}


@settings(deadline=None)
@given(SIZES)
def test_every_pair_of_values_meets_in_some_row(sizes):
    factors = make_factors(sizes)
    covered = set().union(*map(pairs_of, cover_pairs(factors)))
    assert covered == set(all_pairs(factors))


@settings(deadline=None)
@given(SIZES)
def test_no_row_is_idle_and_every_row_has_every_factor(sizes):
    factors = make_factors(sizes)
    seen = set()
    for row in cover_pairs(factors):
        assert list(row) == list(factors)
        assert not pairs_of(row) <= seen
        seen |= pairs_of(row)


def test_the_rows_are_the_same_every_time_and_few():
    factors = make_factors([5, 5, 3, 2, 2, 2, 2, 2])
    rows = cover_pairs(factors)
    assert rows == cover_pairs(factors)
    assert 25 <= len(rows) <= 32


def test_the_full_product_holds_every_combination_once():
    rows = full_product(make_factors([2, 3, 2]))
    assert len({tuple(row.values()) for row in rows}) == len(rows) == 12
    assert list(itertools.islice(rows[0].values(), 3)) == [0, 0, 0]


def named(rows):
    return {f"case {index}": row for index, row in enumerate(rows)}


@settings(deadline=None)
@given(SIZES)
def test_every_value_occurs_in_few_cases(sizes):
    factors = make_factors(sizes)
    cases = named(full_product(factors))
    found = cover_values(cases)
    values = {item for name in found for item in cases[name].items()}
    assert values == {(factor, one) for factor, ones in factors.items() for one in ones}
    assert len(found) <= sum(sizes)
    assert cover_values(dict(reversed(cases.items()))) == found


@given(SIZES, st.integers(1, 12))
def test_a_sample_is_as_large_as_it_is_said_to_be(sizes, most):
    cases = named(full_product(make_factors(sizes)))
    found = cover_values(cases, most)
    assert len(set(found)) == len(found) == min(most, len(cases))
