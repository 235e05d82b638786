"""Whether trials can go on from each other's states, in words that name what tells them apart."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from shoal.core.spec import Scalar
from shoal.planning.populated import differing


@dataclass(frozen=True, slots=True)
class Trial:
    hp: Mapping[str, Scalar]


def told(names: tuple[str, ...], place: int, *rows: tuple[Scalar, ...]) -> list[str]:
    """The names that tell trial ``place`` of ``rows`` from the first; all but "lr" make kinds."""
    trials = [Trial(dict(zip(names, row, strict=True))) for row in rows]
    kinds = [tuple(v for n, v in one.hp.items() if n != "lr") for one in trials]
    return [words.split(" ")[0] for words in differing(trials, place, kinds)]


ROWS = ((0.1, "adam", 128), (0.2, "sgd", 64), (0.3, "adam", 64), (0.4, "sgd", 128))


@pytest.mark.parametrize(
    ("place", "names"), [(1, ["optimizer", "width"]), (2, ["width"]), (3, ["optimizer"])]
)
def test_a_rate_of_each_trials_own_is_not_blamed_where_two_names_make_the_kinds(place, names):
    assert told(("lr", "optimizer", "width"), place, *ROWS) == names


def test_one_name_that_makes_the_kinds_is_told_alone():
    rows = ((0.1, 64), (0.2, 128), (0.3, 64))
    assert told(("lr", "width"), 1, *rows) == ["width"]


def test_of_two_trials_all_that_differs_is_told():
    assert told(("lr", "width"), 1, (0.1, 64), (0.2, 128)) == ["lr", "width"]
