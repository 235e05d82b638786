"""Search spaces: what may stand in one, and what is said of the rest."""

import math

import numpy as np
import pytest

from shoal.core.errors import SpecError
from shoal.search.space import (
    check_space,
    choice,
    grid,
    integer,
    is_finite,
    log_uniform,
    size,
    uniform,
)

UNITS = [0.0, 0.25, 0.5, 0.999999, math.nextafter(1.0, 0.0)]


@pytest.mark.parametrize("unit", UNITS)
def test_values_stay_inside_their_bounds(unit):
    assert 1e-5 <= log_uniform(1e-5, 1e-2).pick(unit) <= 1e-2
    assert -1 <= uniform(-1, 1).pick(unit) <= 1
    assert integer(2, 4).pick(unit) in (2, 3, 4)
    assert integer(1, 1000, log=True).pick(unit) in range(1, 1001)
    assert choice("a", "b").pick(unit) in ("a", "b")


def test_an_integer_reaches_both_ends():
    assert [integer(2, 4).pick(unit) for unit in (0.0, 0.5, 0.99)] == [2, 3, 4]
    assert integer(1, 8, log=True).pick(0.0) == 1
    assert integer(1, 8, log=True).pick(math.nextafter(1.0, 0.0)) == 8


def test_the_middle_of_a_logarithm_is_the_geometric_mean():
    assert log_uniform(1e-4, 1e-2).pick(0.5) == pytest.approx(1e-3)


def test_a_space_of_choices_and_constants_is_finite():
    space = check_space({"a": choice(1, 2), "b": choice("x", "y", "z"), "c": 0.5})

    assert is_finite(space)
    assert size(space) == 6
    assert not is_finite({"a": choice(1), "lr": uniform(0, 1)})


def test_numpy_scalars_become_python_s():
    space = grid(lr=np.array([0.1, 0.2]), width=[np.int64(64)], flag=[np.bool_(True)])

    values = [value for entry in space.values() for value in entry.values]
    assert [type(value) for value in values] == [float, float, int, bool]


def test_a_grid_takes_any_list_of_values():
    space = grid(a=range(3), b=("x", None), c=(value for value in [True, 1.5]))

    assert [entry.values for entry in space.values()] == [(0, 1, 2), ("x", None), (True, 1.5)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: grid(lr=[0.1], width=[]), r"grid\(width=\[\]\) is empty"),
        (lambda: grid(lr=0.1), r"grid\(lr=0\.1\) needs a list.*grid\(lr=\[0\.1\]\)"),
        (lambda: grid(kind="adam"), r"grid\(kind='adam'\) needs a list"),
        (lambda: choice(), "got no values"),
        (lambda: choice([64, 128]), r"choice\(\*values\)"),
        (lambda: choice(64, object), "type type"),
        (lambda: uniform(1, 1), "lo must be below hi"),
        (lambda: uniform(2, 1), "lo must be below hi"),
        (lambda: uniform("a", 1), "'a' is no number"),
        (lambda: uniform(False, 1), "False is no number"),
        (lambda: uniform(0, math.inf), "must be finite"),
        (lambda: log_uniform(0, 1), "needs lo > 0, got 0"),
        (lambda: log_uniform(-1, 1), "needs lo > 0"),
        (lambda: integer(0.5, 3), "whole numbers"),
        (lambda: integer(0, 3, log=True), "needs lo >= 1"),
        (lambda: integer(3, 3), "lo must be below hi"),
    ],
)
def test_a_distribution_that_cannot_be_is_refused(make, words):
    with pytest.raises(SpecError, match=words):
        make()


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ([("lr", 1)], "a space is a dict of distributions or grid.* got list"),
        (
            {"lr": [1, 2]},
            r"'lr' is a list; write choice\(1, 2\) for one of these two, uniform\(1, 2\) or "
            r"log_uniform\(1, 2\) or integer\(1, 2\) for what lies between them\.$",
        ),
        ({"x": (0, 0.5)}, r"write choice\(0, 0.5\) for one of these two, uniform\(0, 0.5\) for w"),
        ({"x": (2, 1)}, r"'x' is a tuple; write choice\(2, 1\)\.$"),
        ({"x": (1, 2, 3)}, r"'x' is a tuple; write choice\(1, 2, 3\)\.$"),
        ({"x": ("a", "b")}, r"'x' is a tuple; write choice\('a', 'b'\)\.$"),
        ({"net": object()}, "'net' has a value of type object"),
        ({"x": 1j}, "'x' has a value of type complex"),
        ({"x": np.zeros(3)}, "'x' has a value of type ndarray"),
        ({3: 1}, "name is a string that is not empty, got 3"),
        ({"": 1}, "name is a string that is not empty"),
        ({"state": 1}, "'state' is reserved"),
        ({"valid_loss": 1}, "'valid_loss' is reserved"),
    ],
)
def test_a_space_that_cannot_be_is_refused(space, words):
    with pytest.raises(SpecError, match=words):
        check_space(space)
