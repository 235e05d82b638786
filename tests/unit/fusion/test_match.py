"""Which trials share an array, and why not: decisions on facts."""

import pytest

from shoal.fusion.matching.match import Signature, first_difference, groups, told_apart

ONE = Signature((("the model", "Net"), ("parameter 'w'", "float32 [4]")))
WIDE = Signature((("the model", "Net"), ("parameter 'w'", "float32 [8]")))
MORE = Signature((*ONE.facts, ("parameter 'b'", "float32 [4]")))


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (ONE, ONE, ""),
        (ONE, WIDE, "parameter 'w': float32 [4] in one, float32 [8] in the other"),
        (ONE, MORE, "parameter 'b': nothing of that name in one, float32 [4] in the other"),
        (MORE, ONE, "parameter 'b': float32 [4] in one, nothing of that name in the other"),
        (ONE, Signature(ONE.facts[::-1]), "the same facts come in another order"),
    ],
)
def test_the_first_difference_is_told_in_words(one, other, words):
    assert first_difference(one, other) == words


def test_a_long_fact_is_told_from_where_it_differs():
    settings = [f"'setting {number}': {number}" for number in range(40)]
    asked, found = list(settings), list(settings)
    asked[20], found[20] = "'kind': None", "'kind': 'rows'"
    one, other = (Signature((("'config'", ", ".join(s)),)) for s in (asked, found))

    words = first_difference(one, other)

    assert words.startswith("'config': ... 'kind': None, 'setting 21'")
    assert "'kind': 'rows', 'setting 21'" in words
    assert len(words) < 250


def test_groups_are_of_equal_signatures_in_the_order_of_their_first():
    assert groups([WIDE, ONE, WIDE, ONE, MORE]) == ((0, 2), (1, 3), (4,))


def test_hyperparameters_that_leave_the_signature_equal_are_fusible():
    hps = [
        {"lr": 0.1, "width": 4, "drop": 0.1, "depth": 2},
        {"lr": 0.2, "width": 4, "drop": 0.1, "depth": 2},
        {"lr": 0.1, "width": 8, "drop": 0.3, "depth": 2},
        {"lr": 0.1, "width": 8, "drop": 0.5, "depth": 2},
    ]

    found = told_apart(hps, [ONE, ONE, WIDE, WIDE])

    assert found.fusible == ("drop", "lr")
    assert found.infusible == ("width",)
