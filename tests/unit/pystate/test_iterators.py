"""How far an iterator got, as far as that can be seen."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from shoal.pystate.iterators import count_at, is_iterator, mark_of


def squares() -> Iterator[int]:
    for number in range(9):
        yield number * number


def same() -> Iterator[int]:
    while True:
        yield 1


KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: iter([1, 2, 3]),
    "dict": lambda: iter({1: 2, 3: 4}),
    "range": lambda: iter(range(3)),
    "generator": squares,
    "its end": lambda: (n for n in (1,)),
    "cycle": lambda: itertools.cycle([1, 2]),
    "chain": lambda: itertools.chain([1, 2], [3]),
    "zip": lambda: zip([1, 2], [3, 4], strict=False),
    "map": lambda: map(str, [1, 2]),
    "enumerate": lambda: enumerate([1, 2]),
    "of a loader": lambda: iter(DataLoader([torch.zeros(1)] * 2)),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_mark_is_another_once_it_went_on_and_looking_takes_nothing(make):
    iterator = make()
    assert is_iterator(iterator)
    before = mark_of(iterator)
    assert mark_of(iterator) == before
    next(iterator)
    assert mark_of(iterator) != before


def test_what_shows_nothing_has_no_mark_that_changes():
    iterator = same()
    next(iterator)
    before = mark_of(iterator)
    next(iterator)
    assert mark_of(iterator) == before
    assert not is_iterator(io.StringIO())


@pytest.mark.parametrize("numbers", [(0, 1), (5, 2), (1.5, 0.5), (-3, 1)], ids=str)
def test_a_count_says_where_it_is(numbers):
    count = itertools.count(*numbers)
    assert count_at(count) == numbers
    assert next(count) == numbers[0]
    assert count_at(count) == (sum(numbers), numbers[1])


def test_a_count_of_other_numbers_does_not():
    with pytest.raises(ValueError, match="malformed"):
        count_at(itertools.count(Fraction(1, 2)))
